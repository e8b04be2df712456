"""What attention means, in plain NumPy float64: one query at a time, looking only at the keys that it may attend to.

Nothing here is fast, and nothing is shared with the library. A NaN at a hidden key cannot reach an answer, because a
hidden key is never read. A mask is a predicate of one pair, so broadcasting cannot be wrong in the same way twice.

Layout: q (..., H, T, D), k (..., K, S, D), v (..., K, S, V); k and v may have a batch of 1. `visible` and `bias`
broadcast to the logits (..., H, T, S); a bias of -inf hides the pair. The logits are scale · q·k + bias.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray


def exact(seed: int, *shape: int) -> Array:
    """Normal values rounded to 1/32 and below 8, so that they are exact in every float type."""
    values = np.random.RandomState(seed).standard_normal(shape)
    return np.clip(np.round(values * 32) / 32, -7.96875, 7.96875)


# ---------------------------------------------------------------- masks


class Pair(NamedTuple):
    """One query and one key: the example, the head, their rows in the arrays, and where they stand."""

    example: tuple[int, ...]
    head: int
    row: int
    column: int
    q_at: int
    k_at: int


Predicate = Callable[[Pair], bool]


def everything(_: Pair) -> bool:
    return True


def causal(p: Pair) -> bool:
    return p.k_at <= p.q_at


def window(left: int | None, right: int | None) -> Predicate:
    return lambda p: (left is None or p.k_at >= p.q_at - left) and (right is None or p.k_at <= p.q_at + right)


def prefix(n: Any) -> Predicate:
    return lambda p: p.k_at < _of_example(n, p.example)


def lengths(kv: Any = None, q: Any = None) -> Predicate:
    def allows(p: Pair) -> bool:
        key_counts = kv is None or p.column < _of_example(kv, p.example)
        return key_counts and (q is None or p.row < _of_example(q, p.example))

    return allows


def segments(q: Array, kv: Array | None = None, pad: int | None = None) -> Predicate:
    def allows(p: Pair) -> bool:
        mine = _of_row(q, p.example, p.row)
        other = _of_row(q if kv is None else kv, p.example, p.column)
        return mine == other and mine != pad

    return allows


def dense(array: Array) -> Predicate:
    def allows(p: Pair) -> bool:
        where = (*p.example, p.head, p.row, p.column)[-array.ndim :]
        return bool(array[tuple(0 if n == 1 else i for n, i in zip(array.shape, where, strict=True))])

    return allows


def both(a: Predicate, b: Predicate) -> Predicate:
    return lambda p: a(p) and b(p)


def either(a: Predicate, b: Predicate) -> Predicate:
    return lambda p: a(p) or b(p)


def neither(a: Predicate) -> Predicate:
    return lambda p: not a(p)


def visible(predicate: Predicate, shape: tuple[int, ...], q_positions: Any = None, kv_positions: Any = None) -> Array:
    """The predicate at every pair of the logits `(..., H, T, S)`, or `(T, S)`."""
    result = np.zeros(shape, bool)
    for index in np.ndindex(*shape):
        example, head = index[:-3], index[-3] if len(shape) > 2 else 0
        row, column = index[-2:]
        q_at, k_at = _standing(q_positions, example, row), _standing(kv_positions, example, column)
        result[index] = predicate(Pair(example, head, row, column, q_at, k_at))
    return result


def _standing(positions: Any, example: tuple[int, ...], row: int) -> int:
    if positions is None:
        return row
    positions = np.asarray(positions)
    return int(positions) + row if positions.ndim == 0 else int(_of_row(positions, example, row))


def _of_example(values: Any, example: tuple[int, ...]) -> int:
    values = np.asarray(values)
    return int(values if values.ndim == 0 else values[_clamp(values.shape, example)])


def _of_row(values: Array, example: tuple[int, ...], row: int) -> int:
    return values[row] if values.ndim == 1 else values[(*_clamp(values.shape[:-1], example), row)]


def _clamp(shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(0 if n == 1 else i for n, i in zip(shape, index, strict=True))


# ---------------------------------------------------------------- attention and its derivatives


@dataclasses.dataclass
class Problem:
    """One call: operands, what is visible, and what is added to the logits.

    `keep` multiplies the weights before the values, as dropout does.
    """

    q: Any
    k: Any
    v: Any
    visible: Any = True
    bias: Any = None
    scale: Any = None
    keep: Any = 1.0

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (self.q, self.k, self.v))
        if self.scale is None:
            self.scale = 1.0 / np.sqrt(self.q.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits."""
        return (*self.q.shape[:-1], self.k.shape[-2])

    def plane(self, values: Any) -> Array:
        """Values for every pair of the logits, in float64."""
        return np.broadcast_to(np.asarray(values, np.float64), self.shape)

    def rows(self) -> "Iterator[Row]":
        """The rows that see something."""
        seen = np.broadcast_to(np.asarray(self.visible), self.shape)
        bias = self.plane(0.0 if self.bias is None else self.bias)
        scale, keep = self.plane(self.scale), self.plane(self.keep)
        seen = seen & ~np.isneginf(bias)
        for at in np.ndindex(*self.q.shape[:-1]):
            keys = np.flatnonzero(seen[at])
            if keys.size:
                source = self._source(at)
                dots = self.k[source][keys] @ self.q[at]
                yield Row(at, source, keys, dots, scale[at][keys], bias[at][keys], keep[at][keys])

    def _source(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where the keys and values of a query lie: its example and its key/value head."""
        if self.q.ndim == 2:
            return ()
        group = self.q.shape[-3] // self.k.shape[-3]
        return (*_clamp(self.k.shape[:-3], at[:-2]), at[-2] // group)


@dataclasses.dataclass
class Row:
    """What one query sees: its keys, their dot products, and the numbers around them."""

    at: tuple[int, ...]
    source: tuple[int, ...]
    keys: Array
    dots: Array
    scale: Array
    bias: Array
    keep: Array

    @property
    def pairs(self) -> tuple[Any, ...]:
        """Index of the row's pairs in an array of the logits' shape."""
        return (*self.at, self.keys)

    def softmax(self) -> tuple[Array, float]:
        """Weights and log-sum-exp."""
        logits = self.scale * self.dots + self.bias
        largest = logits.max()
        terms = np.exp(logits - largest)
        return terms / terms.sum(), largest + np.log(terms.sum())


class Answer(NamedTuple):
    out: Array
    lse: Array
    weights: Array


def attention(problem: Problem) -> Answer:
    """Output, log-sum-exp and weights; zeros, -inf and zeros where a row sees nothing."""
    q, v = problem.q, problem.v
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse, weights = np.full(q.shape[:-1], -np.inf), np.zeros(problem.shape)
    with np.errstate(all="ignore"):
        for row in problem.rows():
            p, lse[row.at] = row.softmax()
            weights[row.pairs] = p
            out[row.at] = (p * row.keep) @ v[row.source][row.keys]
    return Answer(out, lse, weights)


def untouched(problem: Problem) -> dict[str, Array]:
    """Where nothing can come from: outputs of rows that see nothing, gradients of what no row sees or of such rows."""
    nothing = {"q": np.ones(problem.q.shape, bool), "k": np.ones(problem.k.shape, bool)}
    nothing |= {"v": np.ones(problem.v.shape, bool), "bias": np.ones(problem.shape, bool)}
    for row in problem.rows():
        nothing["q"][row.at] = False
        nothing["bias"][row.pairs] = False
        for name in ("k", "v"):
            nothing[name][(*row.source, row.keys)] = False
    nothing["out"] = np.broadcast_to(nothing["q"][..., :1], (*problem.q.shape[:-1], problem.v.shape[-1]))
    if problem.bias is None:
        return nothing
    return nothing | {"bias": fold(~nothing["bias"], np.shape(problem.bias)) == 0}


def vjp(problem: Problem, dout: Array, dlse: Any = 0.0) -> dict[str, Array]:
    """Gradients of sum(out · dout) + sum(lse · dlse) for q, k, v, bias and scale."""
    q, k, v = problem.q, problem.k, problem.v
    dout, dlse = np.asarray(dout, np.float64), np.broadcast_to(np.asarray(dlse, np.float64), q.shape[:-1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dlogits, dscale = np.zeros(problem.shape), np.zeros(problem.shape)
    with np.errstate(all="ignore"):
        for row in problem.rows():
            p, _ = row.softmax()
            keys, values = k[row.source], v[row.source]
            dp = (values[row.keys] @ dout[row.at]) * row.keep
            ds = p * (dp - (p * dp).sum()) + p * dlse[row.at]
            dlogits[row.pairs] = ds
            dscale[row.pairs] = ds * row.dots
            dq[row.at] = (ds * row.scale) @ keys[row.keys]
            dk[(*row.source, row.keys)] += np.outer(ds * row.scale, q[row.at])
            dv[(*row.source, row.keys)] += np.outer(p * row.keep, dout[row.at])
        result = {"q": dq, "k": dk, "v": dv, "scale": fold(dscale, np.shape(problem.scale))}
        if problem.bias is not None:
            result["bias"] = fold(dlogits, np.shape(problem.bias))
    return result


def jvp(problem: Problem, tangents: dict[str, Any]) -> tuple[Array, Array]:
    """Tangents of output and log-sum-exp along tangents of any of q, k, v, bias and scale."""
    q, k, v = problem.q, problem.k, problem.v
    tq, tk, tv = (np.broadcast_to(np.asarray(tangents.get(n, 0.0)), x.shape) for n, x in zip("qkv", (q, k, v)))  # noqa: B905
    tbias, tscale = (problem.plane(tangents.get(name, 0.0)) for name in ("bias", "scale"))
    tout, tlse = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(q.shape[:-1])
    with np.errstate(all="ignore"):
        for row in problem.rows():
            p, _ = row.softmax()
            keys, moved = k[row.source][row.keys], tk[row.source][row.keys]
            ts = row.scale * (keys @ tq[row.at] + moved @ q[row.at])
            ts += tscale[row.pairs] * row.dots + tbias[row.pairs]
            tlse[row.at] = (p * ts).sum()
            tp = p * (ts - tlse[row.at]) * row.keep
            tout[row.at] = tp @ v[row.source][row.keys] + (p * row.keep) @ tv[row.source][row.keys]
    return tout, tlse


def hvp(problem: Problem, dout: Array, dlse: Any, tangents: dict[str, Any], step: float = 1e-5) -> dict[str, Array]:
    """How the gradients of `vjp` move along the tangents, by central differences (about 1e-9 of error)."""

    def moved(sign: float) -> dict[str, Array]:
        values = {
            n: np.asarray(getattr(problem, n), np.float64) + sign * step * np.asarray(t) for n, t in tangents.items()
        }
        return vjp(dataclasses.replace(problem, **values), dout, dlse)

    after, before = moved(1.0), moved(-1.0)
    with np.errstate(all="ignore"):
        return {name: (after[name] - before[name]) / (2 * step) for name in after}


def fold(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which an operand of this shape was broadcast."""
    gradient = gradient.sum(tuple(range(gradient.ndim - len(shape))))
    ones = tuple(axis for axis, n in enumerate(shape) if n == 1)
    return np.asarray(gradient.sum(ones, keepdims=True))
