"""The algebra of masks: what a mask answers, how masks combine, and the two masks that need no positions.

Two questions are enough for every kernel: `allows` for the pairs of one tile, and `bounds` to know, without looking at
pairs, that a tile is empty (skip it) or full (do not mask it). Both are closed under `&`, `|` and `~`.
"""

import abc
import dataclasses
import html
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np

from .errors import explain
from .expressions import Expression
from .given import is_concrete
from .pictures import Picture
from .sides import Axes, Plane, Side


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask(Expression, abc.ABC):
    """Which keys each query may attend to. Immutable, and a JAX pytree."""

    reads_query_position: ClassVar[bool] = False

    @abc.abstractmethod
    def allows(self, q: Side, k: Side) -> Any:
        """Whether each query may attend to each key of one tile (booleans, broadcastable to it)."""

    @abc.abstractmethod
    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        """`(may_any, must_all)` for the same tile, or for every tile of a grid.

        `may_any=False` promises that no pair is allowed, so the tile is skipped; `must_all=True` promises that every
        pair is, so `allows` is not evaluated. (True, False) is always a safe answer. Traced values are welcome.
        """

    def check(self, plane: Plane) -> None:
        """Raises ValueError where the mask does not fit the plane, as far as Python, NumPy and shapes can tell."""
        if self.reads_query_position and not plane.aligned:
            raise ValueError(
                explain(
                    "mask",
                    f"{self!r} compares positions of queries and keys, and T ≠ S leaves open how they are aligned.",
                    {"queries T": plane.queries, "keys S": plane.keys},
                    "Give q_positions=S - T (the last query sees the last key) or q_positions=0 (both start together).",
                )
            )

    def array(
        self,
        queries: int,
        keys: int | None = None,
        *,
        batch: Axes = (),
        heads: int | None = None,
        q_positions: Any = None,
        kv_positions: Any = None,
    ) -> jax.Array:
        """The mask as booleans: `(T, S)`, or batch axes + `(H, T, S)` where `batch` or `heads` is given.

        Args:
            queries: T.
            keys: S; as many as queries by default.
            batch: the batch axes that array fields refer to.
            heads: H; 1 by default where there is a batch.
            q_positions, kv_positions: as in `attention`: the first position, `(T,)` or `(S,)`, or batch axes in front.

        Example:
            >>> from attention_jax.masks import Causal
            >>> Causal().array(3).astype(int).tolist()
            [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        keys = queries if keys is None else keys
        axes = (*batch, 1 if heads is None else heads) if batch or heads is not None else ()
        plane = Plane.of((*axes, queries, keys), q_positions, kv_positions)
        self.check(plane)
        return jnp.broadcast_to(jnp.asarray(self.allows(*plane.whole()), bool), plane.shape)

    def draw(self, queries: int = 16, keys: int | None = None, **where: Any) -> Picture:
        """A picture of the mask, for a terminal or a notebook: queries downwards, keys to the right.

        Takes what `array` takes. Of a batch the first example and head are drawn.

        Example:
            >>> from attention_jax.masks import Causal
            >>> print(Causal().draw(3))
            Causal()
               keys 0-2
             0 █··
             1 ██·
             2 ███
        """
        allowed = np.asarray(self.array(queries, keys, **where))
        return Picture(allowed.reshape(-1, *allowed.shape[-2:])[0], repr(self))

    def _repr_html_(self) -> str:
        try:
            return self.draw()._repr_html_()
        except (ValueError, TypeError):  # array fields of another length, or traced ones
            return f"<code>{html.escape(repr(self))}</code>"

    __array_ufunc__ = None  # so that `numpy_array & mask` asks the mask

    def __and__(self, other: Any) -> "Mask":
        return And(self, as_mask(other))

    def __rand__(self, other: Any) -> "Mask":
        return And(as_mask(other), self)

    def __or__(self, other: Any) -> "Mask":
        return Or(self, as_mask(other))

    def __ror__(self, other: Any) -> "Mask":
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        rule = "a mask has no truth value: `a and b` would silently be b."
        raise TypeError(explain("mask", rule, {}, "Use a & b, a | b, ~a."))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Pair(Mask):
    a: Mask
    b: Mask

    def check(self, plane: Plane) -> None:
        self.a.check(plane)
        self.b.check(plane)


@final
class And(_Pair):
    """Pairs that both masks allow."""

    def allows(self, q: Side, k: Side) -> Any:
        return self.a.allows(q, k) & self.b.allows(q, k)

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        (any_a, all_a), (any_b, all_b) = self.a.bounds(q, k), self.b.bounds(q, k)
        return any_a & any_b, all_a & all_b

    def __repr__(self) -> str:
        return " & ".join(f"({x!r})" if isinstance(x, Or) else repr(x) for x in (self.a, self.b))


@final
class Or(_Pair):
    """Pairs that either mask allows."""

    def allows(self, q: Side, k: Side) -> Any:
        return self.a.allows(q, k) | self.b.allows(q, k)

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        (any_a, all_a), (any_b, all_b) = self.a.bounds(q, k), self.b.bounds(q, k)
        return any_a | any_b, all_a | all_b

    def __repr__(self) -> str:
        return f"{self.a!r} | {self.b!r}"


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """Pairs that the mask forbids."""

    a: Mask

    def check(self, plane: Plane) -> None:
        self.a.check(plane)

    def allows(self, q: Side, k: Side) -> Any:
        return _not(self.a.allows(q, k))

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        may_any, must_all = self.a.bounds(q, k)
        return _not(must_all), _not(may_any)

    def __repr__(self) -> str:
        return f"~({self.a!r})" if isinstance(self.a, _Pair) else f"~{self.a!r}"


@final
class Full(Mask):
    """Every query may attend to every key."""

    def allows(self, q: Side, k: Side) -> Any:
        return np.True_

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        return np.True_, np.True_


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Pairs given by a boolean array.

    Attributes:
        pairs: `(T|1, S|1)`, or all axes of the logits, `(..., H, T, S)`, with 1 where it broadcasts.
    """

    pairs: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", _booleans(self.pairs))

    def check(self, plane: Plane) -> None:
        check_broadcast("a mask array", self.pairs.shape, plane)

    def allows(self, q: Side, k: Side) -> Any:
        return q.cut(self.pairs, k)

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        pairs = q.cut(self.pairs, k)
        return k.span(q.span(pairs)[1])[1], k.span(q.span(pairs)[0])[0]


def as_mask(mask: Any) -> Mask:
    """A `Mask` from None (everything), a boolean array, or a `Mask`.

    Raises:
        TypeError: for anything else; integer and float arrays say how to turn them into booleans.
    """
    if mask is None:
        return Full()
    return mask if isinstance(mask, Mask) else Dense(mask)


def check_broadcast(what: str, shape: Axes, plane: Plane) -> None:
    """Raises ValueError unless `shape` has two axes, or all axes of the logits, each of full size or 1."""
    full = plane.shape[-2:] if len(shape) == 2 else plane.shape
    if len(shape) != len(full) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(
            explain(
                "attention",
                f"{what} must have two axes, (T|1, S|1), or all axes of the logits, with 1 where it broadcasts.",
                {what: shape, "logits (..., H, T, S)": plane.shape},
                "A mask per example is array[:, None, :, :], per head array[None, :, :, :]; "
                "key padding (B, S) is array[:, None, None, :], or Lengths(kv=lengths).",
            )
        )


def _not(value: Any) -> Any:
    return np.logical_not(value) if is_concrete(value) else jnp.logical_not(value)


def _booleans(pairs: Any) -> Any:
    if not isinstance(pairs, (np.ndarray, jax.Array)):
        rule = "a mask must be a boolean array or a mask object."
        raise TypeError(explain("mask", rule, {"got": type(pairs).__name__}, "Make an array of it: np.asarray(mask)."))
    if pairs.dtype != bool:
        remedy = "Use mask != 0 where nonzero means «may attend»; floats that are added to the logits go to bias=."
        given = {"mask": f"{pairs.dtype}{pairs.shape}"}
        raise TypeError(explain("mask", "a mask array must be boolean.", given, remedy))
    return pairs
