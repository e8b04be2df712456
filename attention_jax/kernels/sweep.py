"""A walk over the tiles of a call: which part of the arrays, which rows, which keys; and what the mask says of them.

A walk goes over parts, in a part over rows of tiles, in a row over the tiles that are not empty. A part is a box of
batch axes and heads: small enough for a cache where one processor does one part after the other, or everything at once
where batch and heads may be spread over devices, since a loop over a sharded axis would gather it.

Under `vmap` mapped axes stand in front of the batch axes, 1 long in arrays that are not mapped. A mask is asked under
`vmap` then, so that its fields mean what they mean without.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import dropout
from ..sides import Part, Plane
from ..tiles import Lists, Tiling, bounds_of, lists_of
from .call import Setting

Carry = TypeVar("Carry")


class Row(NamedTuple):
    """Row i of the tiles of a part."""

    part: Part
    i: Any


class Tile(NamedTuple):
    """Tile (i, j) of a part; `masked`: whether the mask may hide some of its pairs."""

    part: Part
    i: Any
    j: Any
    masked: bool


class Sweep:
    """The walk over one call.

    Attributes:
        lead: mapped axes and batch axes, of all operands together.
        heads, kv_heads: H and K.
        tiling: how the plane is cut.
        masked: whether any pair may be hidden.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        mapped: int,
        lead: tuple[Any, ...],
        heads: int,
        kv_heads: int,
        tiling: Tiling,
        sizes: tuple[Any, ...],
        biased: bool,
    ) -> None:
        """Looks at the mask's bounds.

        Args:
            setting: with `mapped` axes in front of each of its arrays.
            sizes: of a part, along `lead` and the key/value heads.
            biased: whether a bias may hide pairs.
        """
        self.setting, self.mapped, self.lead, self.tiling = setting, mapped, lead, tiling
        self.heads, self.kv_heads, self.sizes = heads, kv_heads, sizes
        self.masked = setting.masks or biased
        self._bounds = self._all_bounds(biased)
        alike = all(isinstance(n, int) and n == 1 for n in self._bounds[0].shape[:-2])
        self._lists = self._listed(*self._bounds) if alike else None

    # ------------------------------------------------------------ parts

    def over_parts(self, body: Callable[[Part, Carry], Carry], carry: Carry) -> Carry:
        """`body` for every part, one after the other."""
        whole = (*self.lead, self.kv_heads)
        counts = [1 if size == n else n // size for n, size in zip(whole, self.sizes, strict=True)]
        if all(isinstance(n, int) and n == 1 for n in counts):
            return body(Part((0,) * len(whole), self.sizes), carry)

        def one(n: Any, carry: Carry) -> Carry:
            starts = []
            for count, size in zip(reversed(counts), reversed(self.sizes), strict=True):
                alone = isinstance(count, int) and count == 1
                starts.append(0 if alone else lax.rem(n, _number(count)) * _number(size))
                n = n if alone else lax.div(n, _number(count))
            return body(Part(tuple(reversed(starts)), self.sizes), carry)

        return loop(0, math.prod(counts), one, carry)

    def queries_of(self, part: Part) -> Part:
        """The same part by query heads."""
        group = self.heads // self.kv_heads
        return Part((*part.starts[:-1], part.starts[-1] * group), (*part.sizes[:-1], part.sizes[-1] * group))

    # ------------------------------------------------------------ tiles

    def over_rows(self, part: Part, body: Callable[[Row, Carry], Carry], carry: Carry) -> Carry:
        """`body` for every row of tiles, from the last to the first: rows that the last one covers twice come again."""
        down = self.tiling.down
        if down == 1:
            return body(Row(part, 0), carry)
        step = lambda n, carry: body(Row(part, np.int32(down - 1) - n), carry)  # noqa: E731
        return loop(0, down, step, carry)

    def over_keys(self, lists: Lists, row: Row, body: Callable[[Tile, Carry], Carry], carry: Carry) -> Carry:
        """`body` for each tile of a row that is not empty."""
        if self.single(lists):
            return body(Tile(*row, 0, bool(lists.some.any())), carry)
        order, full, some = (jnp.asarray(x)[row.i] for x in lists)
        if _any(lists.full):
            carry = loop(0, full, lambda n, carry: body(Tile(*row, order[n], False), carry), carry)
        if _any(lists.some):
            carry = loop(full, full + some, lambda n, carry: body(Tile(*row, order[n], True), carry), carry)
        return carry

    def single(self, lists: Lists) -> bool:
        """Whether each row of tiles has one tile, which is not to be skipped."""
        concrete = isinstance(lists.full, np.ndarray)
        return self.tiling.across == 1 and concrete and bool((lists.full + lists.some > 0).all())

    def lists(self, part: Part) -> Lists:
        """The tiles of a part."""
        if self._lists is not None:
            return self._lists
        queries = self.queries_of(part)
        return self._listed(*(queries.cut(bound) for bound in self._bounds))

    def count(self) -> tuple[int, int]:
        """How many tiles are computed, of how many, for all heads. What only values can tell counts as computed."""
        each, whole = self.tiling.down * self.tiling.across, (*self.lead, self.kv_heads)
        heads = math.prod(whole) * self.heads // self.kv_heads
        may_any = self._bounds[0]
        if not isinstance(may_any, np.ndarray) or not all(isinstance(n, int) for n in whole):
            return heads * each, heads * each
        in_step = math.prod(self.sizes) * self.heads // self.kv_heads
        found = 0
        for at in np.ndindex(*(n // size for n, size in zip(whole, self.sizes, strict=True))):
            starts = tuple(n * size for n, size in zip(at, self.sizes, strict=True))
            lists = self.lists(Part(starts, self.sizes))
            found += int(lists.full.sum() + lists.some.sum()) * in_step
        return found, heads * each

    def _listed(self, may_any: Any, must_all: Any) -> Lists:
        axes = tuple(range(may_any.ndim - 2))
        return lists_of(may_any.any(axes), must_all.all(axes), self.tiling)

    def _all_bounds(self, biased: bool) -> tuple[Any, Any]:
        everything = Part((0,) * (len(self.lead) + 1), (*self.lead, self.heads))

        def bounds(setting: Setting) -> tuple[Any, Any]:
            shape = (*self.lead[self.mapped :], self.heads, self.tiling.queries, self.tiling.keys)
            plane = Plane(shape, setting.q_positions, setting.kv_positions)
            return bounds_of(setting.mask, plane, self.tiling)

        may_any, must_all = self._asked(bounds, everything)
        return may_any, must_all & np.bool_(not biased)

    # ------------------------------------------------------------ what is cut out

    def rows(self, x: Any, at: Row | Tile) -> Any:
        """The queries' rows of a tile, of an array `(..., H, T, n)`."""
        return self._rows(at).cut(x)

    def keys(self, x: Any, at: Tile) -> Any:
        """The keys' rows of a tile, of an array `(..., K, S, n)`."""
        part = at.part
        return Part((*part.starts, self.tiling.column(at.j)), (*part.sizes, self.tiling.columns)).cut(x)

    def pairs(self, x: Any, at: Tile) -> Any:
        """The tile of an array that broadcasts to the logits."""
        return self._pairs(at).cut(x)

    def put_rows(self, x: Any, rows: Any, at: Row) -> Any:
        """`x` with the queries' rows of a tile replaced."""
        return put(x, rows, self._rows(at).starts)

    def add_pairs(self, x: Any, pairs: Any, at: Tile) -> Any:
        """`x`, which broadcasts to the logits, with a tile added that is summed where `x` broadcasts."""
        return add(x, pairs, self._pairs(at))

    def fresh_rows(self, at: Row) -> Any:
        """Which rows of a tile belong to no tile above, `(..., rows, 1)`; None: all."""
        if self.tiling.queries % self.tiling.rows == 0:
            return None
        rows = self.tiling.row(at.i) + lax.iota(jnp.int32, self.tiling.rows)
        return (rows >= at.i * np.int32(self.tiling.rows)).reshape((1,) * (len(self.lead) + 1) + (-1, 1))

    def _rows(self, at: Row | Tile) -> Part:
        queries = self.queries_of(at.part)
        return Part((*queries.starts, self.tiling.row(at.i)), (*queries.sizes, self.tiling.rows))

    def _pairs(self, at: Tile) -> Part:
        rows = self._rows(at)
        return Part((*rows.starts, self.tiling.column(at.j)), (*rows.sizes, self.tiling.columns))

    # ------------------------------------------------------------ what the setting says

    def visible(self, at: Tile, bias: Any) -> Any:
        """Which pairs of a tile count, broadcastable to its logits; None: all."""
        if not at.masked:
            return None
        allowed = jnp.asarray(self._asked(lambda setting: self._of_tile(setting, at, setting.mask.allows), at.part))
        if self.tiling.keys % self.tiling.columns:
            columns = self.tiling.column(at.j) + lax.iota(jnp.int32, self.tiling.columns)
            fresh = columns >= at.j * np.int32(self.tiling.columns)
            allowed = allowed & fresh.reshape((1,) * (allowed.ndim - 1) + fresh.shape)
        return allowed if bias is None else allowed & (bias != -jnp.inf)

    def kept(self, at: Tile) -> Any:
        """Which weights of a tile dropout keeps; None: all."""
        if self.setting.dropping is None:
            return None

        def keep(setting: Setting) -> Any:
            seed, rate = setting.dropping  # pyright: ignore[reportGeneralTypeIssues]
            lead = self._unmapped(at.part)
            return self._of_tile(setting, at, lambda q, k: dropout.keep(seed, rate, lead, q, k))

        return self._asked(keep, at.part)

    def _of_tile(self, setting: Setting, at: Tile, ask: Callable[..., Any]) -> Any:
        tiling = self.tiling
        shape = (*self.lead[self.mapped :], self.heads, tiling.queries, tiling.keys)
        plane = Plane(shape, setting.q_positions, setting.kv_positions, part=self._unmapped(at.part))
        answer = ask(*plane.tile(tiling.row(at.i), tiling.rows, tiling.column(at.j), tiling.columns))
        xp: Any = np if isinstance(answer, np.generic | np.ndarray) else jnp
        return xp.reshape(answer, (1,) * (len(shape) - np.ndim(answer)) + np.shape(answer))

    def _unmapped(self, part: Part) -> Part:
        """The batch axes and query heads of a part."""
        queries = self.queries_of(part)
        return Part(queries.starts[self.mapped :], queries.sizes[self.mapped :])

    def _asked(self, ask: Callable[[Setting], Any], part: Part) -> Any:
        """`ask` of the setting of every mapped example of a part."""
        leaves, tree = jax.tree.flatten(self.setting)
        outer = Part(part.starts[: self.mapped], part.sizes[: self.mapped])
        return _over_mapped(lambda *leaves: ask(jax.tree.unflatten(tree, leaves)), self.mapped)(*map(outer.cut, leaves))


def _over_mapped(fn: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """`fn` of arrays with mapped axes in front, 1 long where an array is not mapped; its results have them too."""
    if not axes:
        return fn
    inner = _over_mapped(fn, axes - 1)

    def outer(*arrays: Any) -> Any:
        mapped = [x.shape[0] != 1 for x in arrays]
        arrays = tuple(x if there else x[0] for x, there in zip(arrays, mapped, strict=True))
        if not any(mapped):
            return jax.tree.map(lambda x: x[None], inner(*arrays))
        return jax.vmap(inner, in_axes=tuple(0 if there else None for there in mapped))(*arrays)

    return outer


def loop(start: Any, stop: Any, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
    """`body` for each number from `start` up to `stop`; numbers are int32 under x64 too."""
    counted = lambda n, carry: body(lax.convert_element_type(n, jnp.int32), carry)  # noqa: E731
    return lax.fori_loop(_number(start), _number(stop), counted, carry)


def put(x: Any, block: Any, starts: tuple[Any, ...]) -> Any:
    """`x` with a block in the place that starts there along the axes in front."""
    if x.shape == block.shape:
        return block.astype(x.dtype)
    starts = (*starts, *[0] * (x.ndim - len(starts)))
    return lax.dynamic_update_slice(x, block.astype(x.dtype), Part.at(starts))


def add(x: Any, block: Any, place: Part) -> Any:
    """`x` with a block added in a place, summed over the axes along which `x` is 1 long."""
    axes = tuple(n for n, (size, mine) in enumerate(zip(block.shape, x.shape, strict=True)) if mine == 1 and size != 1)
    block = block.sum(axes, keepdims=True) if axes else block
    starts = tuple(0 if mine == 1 else start for start, mine in zip(place.starts, x.shape, strict=False))
    return put(x, place.cut(x) + block.astype(x.dtype), starts)


def _number(n: Any) -> Any:
    return jnp.asarray(n, jnp.int32) if not isinstance(n, int) else np.int32(n)


def _any(counts: Any) -> bool:
    return bool(counts.any()) if isinstance(counts, np.ndarray) else True
