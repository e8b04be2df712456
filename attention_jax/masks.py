"""Which keys each query may attend to, as functions of positions.

A mask is a small immutable expression: leaves such as `Causal()` and `Lengths(kv=...)`, joined by `&`, `|` and `~`. It
stores no shape. Positions decide what `Causal`, `Window`, `Prefix` and `Where` see; rows of the arrays decide what
`Lengths`, `Segments` and `Dense` mean. A new mask is one class here. Python numbers in a mask are static (a new value
traces anew), but for those given to `Where`; arrays, NumPy's included, are leaves and may be traced.

Example:
    >>> from attention_jax.masks import Causal, Window
    >>> Causal() & Window(left=1, right=None)
    Causal() & Window(left=1, right=None)
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np

from .errors import explain
from .expressions import show
from .given import is_concrete
from .mask_algebra import And as And
from .mask_algebra import Dense as Dense
from .mask_algebra import Full as Full
from .mask_algebra import Mask as Mask
from .mask_algebra import Not as Not
from .mask_algebra import Or as Or
from .mask_algebra import as_mask as as_mask
from .mask_fields import INT32, REACH, check_each, check_rows, integers
from .sides import Plane, Side, over_examples, share_an_id


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query sees the keys that stand at its own position or before it."""

    reads_query_position: ClassVar[bool] = True

    def allows(self, q: Side, k: Side) -> Any:
        return k.position <= q.position

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        (q_low, q_high), (k_low, k_high) = q.span(q.position), k.span(k.position)
        return k_low <= q_high, k_high <= q_low


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query at i sees keys at j with i - left ≤ j ≤ i + right, both ends included; None opens a side.

    Attributes:
        left, right: ints below 2^30, or integer arrays: one number, or batch axes.
    """

    left: Any
    right: Any
    reads_query_position: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            reach = integers(self, name, REACH)
            traced = isinstance(reach, jax.Array)  # cannot be read, and must not wrap in `position + reach`
            object.__setattr__(self, name, jnp.clip(reach, *REACH) if traced else reach)

    def check(self, plane: Plane) -> None:
        super().check(plane)
        for name in ("left", "right"):
            check_each(self, name, plane)

    def allows(self, q: Side, k: Side) -> Any:
        inside = np.True_
        if self.left is not None:
            inside = k.position >= q.position - q.each(self.left)
        if self.right is not None:
            inside = inside & (k.position <= q.position + q.each(self.right))
        return inside

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        (q_low, q_high), (k_low, k_high) = q.span(q.position), k.span(k.position)
        may_any = must_all = np.True_
        if self.left is not None:
            left = q.each(self.left)
            may_any, must_all = k_high >= q_low - left, k_low >= q_high - left
        if self.right is not None:
            right = q.each(self.right)
            may_any, must_all = may_any & (k_low <= q_high + right), must_all & (k_high <= q_low + right)
        if self.left is not None and self.right is not None:
            may_any = may_any & (q.each(self.left) + q.each(self.right) >= 0)  # else no distance is inside
        return may_any, must_all


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """Every query sees the keys at positions below n. A prefix LM is `Causal() | Prefix(n)`.

    Attributes:
        n: an int, or an integer array: one number, or batch axes.
    """

    n: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integers(self, "n", required=True))

    def check(self, plane: Plane) -> None:
        check_each(self, "n", plane)

    def allows(self, q: Side, k: Side) -> Any:
        return k.position < k.each(self.n)

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        low, high = k.span(k.position)
        return low < k.each(self.n), high < k.each(self.n)


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """The first `kv` rows of k are real, and the first `q` rows of q.

    Hiding padding keys does not blank the rows of padding queries: those still attend to the real keys. `q=` makes them
    empty rows, whose output is zero. Lengths count rows of the arrays, wherever these stand; a traced length above S
    means S.

    Attributes:
        kv, q: an int, or an integer array: one number, or batch axes.
    """

    kv: Any = None
    q: Any = None

    def __post_init__(self) -> None:
        for name in ("kv", "q"):
            object.__setattr__(self, name, integers(self, name, (0, INT32[1])))

    def check(self, plane: Plane) -> None:
        for name, letter, rows in (("kv", "keys S", plane.keys), ("q", "queries T", plane.queries)):
            check_each(self, name, plane)
            value = getattr(self, name)
            if value is not None and is_concrete(value) and np.max(value, initial=0) > rows:
                rule = f"Lengths({name}=...) goes beyond the array."
                raise ValueError(explain("mask", rule, {f"{name} lengths": value, letter: rows}))

    def allows(self, q: Side, k: Side) -> Any:
        real = np.True_
        if self.kv is not None:
            real = k.index < k.each(self.kv)
        if self.q is not None:
            real = real & (q.index < q.each(self.q))
        return real

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        may_any = must_all = np.True_
        if self.kv is not None:
            low, high = k.span(k.index)
            may_any, must_all = low < k.each(self.kv), high < k.each(self.kv)
        if self.q is not None:
            low, high = q.span(q.index)
            may_any, must_all = may_any & (low < q.each(self.q)), must_all & (high < q.each(self.q))
        return may_any, must_all


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """A query sees the keys that carry its own id: documents packed into one row do not see each other.

    Attributes:
        q: integer ids, `(T,)` or batch axes + `(T,)`.
        kv: likewise for keys, with S; None: the ids of the queries (T = S).
        pad: rows and keys with this id match nothing, not even each other; one number, or one per example.

    Tile bounds compare the smallest and largest id of each tile: exact for sorted ids (which packing gives), safe for
    any; ids that are NumPy arrays are compared exactly.
    """

    q: Any
    kv: Any = None
    _: dataclasses.KW_ONLY
    pad: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "q", integers(self, "q", required=True, rows=True))
        object.__setattr__(self, "kv", integers(self, "kv", rows=True))
        object.__setattr__(self, "pad", integers(self, "pad"))

    def check(self, plane: Plane) -> None:
        if self.kv is None and plane.queries != plane.keys:
            rule, facts = "Segments(q) alone needs T = S.", {"queries T": plane.queries, "keys S": plane.keys}
            raise ValueError(explain("mask", rule, facts, "Give the ids of the keys: Segments(q, kv)."))
        check_rows(self, "q", plane, plane.queries)
        check_rows(self, "kv", plane, plane.keys)
        check_each(self, "pad", plane)

    def allows(self, q: Side, k: Side) -> Any:
        q_id, k_id = q.take(self.q), k.take(self.q if self.kv is None else self.kv)
        same = q_id == k_id
        return same if self.pad is None else same & (q_id != q.each(self.pad))

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        q_ids, k_ids = q.take(self.q), k.take(self.q if self.kv is None else self.kv)
        (q_low, q_high), (k_low, k_high) = self._span(q, q_ids), self._span(k, k_ids)
        may_any = (q_low <= k_high) & (k_low <= q_high)
        must_all = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        if self.pad is not None:
            q_pad, k_pad = q.span(q_ids == q.each(self.pad))[1], k.span(k_ids == k.each(self.pad))[1]
            must_all = must_all & ~q_pad & ~k_pad
        if (
            is_concrete(q_ids)
            and is_concrete(k_ids)
            and (self.pad is None or (is_concrete(self.pad) and np.ndim(self.pad) == 0))
        ):
            may_any = may_any & share_an_id(q, k, q_ids, k_ids, self.pad)
        return may_any, must_all

    def _span(self, side: Side, ids: Any) -> tuple[Any, Any]:
        """Smallest and largest id that is not the pad's, per tile."""
        if self.pad is None:
            return side.span(ids)
        xp = np if is_concrete(ids) and is_concrete(self.pad) else jnp
        ends, real = np.iinfo(np.int32), ids != side.each(self.pad)
        return side.span(xp.where(real, ids, ends.max))[0], side.span(xp.where(real, ids, ends.min))[1]


@final
@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class Where(Mask):
    """Pairs that a function of the two positions allows.

    Attributes:
        fn: `fn(q_pos (t, 1), k_pos (1, s), *arrays)` gives booleans that broadcast to (t, s). Define it once: a fresh
            closure traces anew at every call. What changes is passed as arrays.
        arrays: come to `fn` whole; one per example through `vmap`.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    reads_query_position: ClassVar[bool] = True

    def __init__(self, fn: Callable[..., Any], *arrays: Any) -> None:
        if not callable(fn):
            raise TypeError(explain("mask", "Where(fn, *arrays) takes a function first.", {"fn": type(fn).__name__}))
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)

    def allows(self, q: Side, k: Side) -> Any:
        return over_examples(self._pairs, q, k)

    def bounds(self, q: Side, k: Side) -> tuple[Any, Any]:
        return np.True_, np.False_

    def _pairs(self, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
        pairs, shape = jnp.asarray(self.fn(q_pos, k_pos, *self.arrays)), (q_pos.shape[0], k_pos.shape[1])
        ends = zip(reversed(pairs.shape), reversed(shape), strict=False)
        if pairs.dtype != bool or pairs.ndim > 2 or any(n not in (1, m) for n, m in ends):
            rule = "the function of Where must give booleans that broadcast to (t, s)."
            raise ValueError(explain("mask", rule, {"got": f"{pairs.dtype}{pairs.shape}", "(t, s)": shape}))
        return jnp.broadcast_to(pairs, shape)

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", "fn")
        return f"Where({', '.join([name, *map(show, self.arrays)])})"
