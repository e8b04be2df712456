"""What the suites are made of: masks beside their predicates, shapes, and a way to let every pair of choices meet."""

import dataclasses
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from attention_jax import masks


@dataclasses.dataclass(frozen=True)
class Shape:
    """The axes of one call. `heads=None` is one head without a head axis."""

    batch: tuple[int, ...]
    heads: int | None
    kv_heads: int
    queries: int
    keys: int
    width: int = 4
    value_width: int = 4
    kv_batch: tuple[int, ...] | None = None

    @property
    def lead(self):
        return self.batch if self.heads is None else (*self.batch, self.heads)

    @property
    def kv_lead(self):
        batch = self.batch if self.kv_batch is None else self.kv_batch
        return batch if self.heads is None else (*batch, self.kv_heads)

    @property
    def logits(self):
        return (*self.lead, self.queries, self.keys)

    @property
    def q(self):
        return (*self.lead, self.queries, self.width)

    @property
    def k(self):
        return (*self.kv_lead, self.keys, self.width)

    @property
    def v(self):
        return (*self.kv_lead, self.keys, self.value_width)

    @property
    def out(self):
        return (*self.lead, self.queries, self.value_width)


SHAPES = {
    "one head": Shape((), None, 1, 5, 5),
    "grouped": Shape((), 4, 2, 7, 7, 3, 5),
    "cross": Shape((2,), 2, 2, 5, 9, 4, 6),
    "two batch axes": Shape((2, 2), 3, 1, 4, 4),
    "shared prefix": Shape((3,), 4, 2, 3, 11, kv_batch=(1,)),
    "odd": Shape((2,), 2, 1, 19, 23, 3, 2),
    "single": Shape((2,), 2, 2, 1, 1, 1, 1),
}
EMPTY_SHAPES = {
    "no queries": Shape((2,), 2, 1, 0, 3),
    "no keys": Shape((2,), 2, 1, 3, 0),
    "no examples": Shape((0,), 2, 1, 3, 3),
    "nothing": Shape((0,), 4, 2, 0, 0),
}


def reach(q_at, k_at):
    """A pointwise rule for `Where`, on arrays and on numbers alike."""
    return (k_at - q_at) % 3 != 1


def reach_modulo(q_at, k_at, modulus):
    return (k_at + q_at) % modulus != 0


def _ids(rng, shape, rows):
    return np.sort(rng.integers(0, 3, (*shape.batch, rows)), axis=-1).astype(np.int32)


def _dense(rng, *axes):
    return rng.random(axes) < 0.6


def _leaf(mask, predicate):
    return lambda rng, shape: (mask, predicate)


def _prefix(rng, shape):
    n = rng.integers(-1, shape.keys + 1, shape.batch).astype(np.int32) if shape.batch else int(rng.integers(0, 4))
    return masks.Prefix(n), oracle.prefix(n)


def _lengths(rng, shape):
    kv = rng.integers(0, shape.keys + 1, shape.batch).astype(np.int32)
    return masks.Lengths(kv=kv), oracle.lengths(kv)


def _two_lengths(rng, shape):
    kv, q = min(shape.keys, 3), rng.integers(0, shape.queries + 1, shape.batch).astype(np.int32)
    return masks.Lengths(kv=kv, q=q), oracle.lengths(kv, q)


def _segments(rng, shape):
    q, kv = _ids(rng, shape, shape.queries), _ids(rng, shape, shape.keys)
    return masks.Segments(q, kv), oracle.segments(q, kv)


def _own_segments(rng, shape):
    if shape.queries != shape.keys:
        return _padded_segments(rng, shape)
    ids = rng.integers(0, 3, shape.queries).astype(np.int64)  # unsorted, one row for all examples
    return masks.Segments(ids), oracle.segments(ids)


def _padded_segments(rng, shape):
    q, kv = _ids(rng, shape, shape.queries), _ids(rng, shape, shape.keys)
    return masks.Segments(q, kv, pad=2), oracle.segments(q, kv, pad=2)


def _pairs(rng, shape):
    pairs = _dense(rng, shape.queries, shape.keys)
    return masks.Dense(pairs), oracle.dense(pairs)


def _pairs_of_each(rng, shape):
    pairs = _dense(rng, *shape.logits)
    return masks.Dense(pairs), oracle.dense(pairs)


def _keys_of_each(rng, shape):
    pairs = _dense(rng, *shape.batch, *(() if shape.heads is None else (1,)), 1, shape.keys)
    return masks.Dense(pairs), oracle.dense(pairs)


def _rule(rng, shape):
    return masks.Where(reach), lambda p: reach(p.q_at, p.k_at)


def _rule_with_array(rng, shape):
    return masks.Where(reach_modulo, np.int32(3)), lambda p: reach_modulo(p.q_at, p.k_at, 3)


LEAVES = {
    "full": _leaf(masks.Full(), oracle.everything),
    "causal": _leaf(masks.Causal(), oracle.causal),
    "window": _leaf(masks.Window(2, 0), oracle.window(2, 0)),
    "wide window": _leaf(masks.Window(1, 3), oracle.window(1, 3)),
    "open window": _leaf(masks.Window(None, 1), oracle.window(None, 1)),
    "prefix": _prefix,
    "lengths": _lengths,
    "lengths of both": _two_lengths,
    "segments": _segments,
    "own segments": _own_segments,
    "padded segments": _padded_segments,
    "pairs": _pairs,
    "pairs of each": _pairs_of_each,
    "keys of each": _keys_of_each,
    "rule": _rule,
    "rule with array": _rule_with_array,
}


def _joined(join, rule, *names):
    def build(rng, shape):
        (a, a_rule), (b, b_rule) = (MASKS[name](rng, shape) for name in names)
        return join(a, b), rule(a_rule, b_rule)

    return build


def _inverse(name):
    def build(rng, shape):
        mask, predicate = MASKS[name](rng, shape)
        return ~mask, oracle.neither(predicate)

    return build


def _array_and_mask(rng, shape):
    pairs = _dense(rng, shape.queries, shape.keys)
    return pairs & masks.Causal(), oracle.both(oracle.dense(pairs), oracle.causal)


MASKS = {
    **LEAVES,
    "none": lambda rng, shape: (None, oracle.everything),
    "boolean array": lambda rng, shape: ((pairs := _dense(rng, *shape.logits)), oracle.dense(pairs)),
    "prefix lm": _joined(operator.or_, oracle.either, "causal", "prefix"),
    "causal documents": _joined(operator.and_, oracle.both, "causal", "padded segments"),
    "causal lengths": _joined(operator.and_, oracle.both, "causal", "lengths of both"),
    "not causal": _inverse("causal"),
    "not documents": _inverse("padded segments"),
    "not the prefix lm": _inverse("prefix lm"),
    "array and causal": _array_and_mask,
    "nothing": _inverse("full"),
}


PLAIN = Shape((), None, 1, 6, 6)
BATCHED = Shape((2,), 2, 1, 5, 7)


def built(name, seed, shape):
    return MASKS[name](np.random.default_rng(seed), shape)


def positions(name, rng, shape):
    """`q_positions`, `kv_positions` by name; keywords for the call and for `oracle.visible`."""
    if name == "plain":
        return {} if shape.queries == shape.keys else {"q_positions": shape.keys - shape.queries}
    if name == "offset":
        return {"q_positions": jnp.int32(-1), "kv_positions": np.asarray(-2)}
    q = rng.integers(-3, shape.keys + 3, (*shape.batch, shape.queries)).astype(np.int32)
    return {"q_positions": q, "kv_positions": rng.permutation(shape.keys).astype(np.int32)}


def quick_jit(fn):
    """`jit` that spends less time on optimising: for programs that run once, on arrays of a few numbers."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def combinations(full=False, **factors):
    """Rows of choices in which every pair of choices meets (pairwise), or the full product."""
    names, lists = list(factors), [list(values) for values in factors.values()]
    product = list(itertools.product(*lists))
    if full:
        return [dict(zip(names, row, strict=True)) for row in product]
    axes = list(itertools.combinations(range(len(names)), 2))
    missing = {(i, j, a, b) for i, j in axes for a in lists[i] for b in lists[j]}
    chosen, rng = [], np.random.default_rng(0)
    while missing:
        i, j, a, b = min(missing, key=lambda pair: tuple(map(str, pair)))
        best, gain = None, -1
        for _ in range(60):
            row = [values[rng.integers(len(values))] for values in lists]
            row[i], row[j] = a, b
            new = sum((x, y, row[x], row[y]) in missing for x, y in axes)
            if new > gain:
                best, gain = row, new
        missing -= {(x, y, best[x], best[y]) for x, y in axes}
        chosen.append(dict(zip(names, best, strict=True)))
    return chosen
