"""The (T, S) plane of one call, and the two sides of any tile of it.

A mask never sees whole arrays of the plane. It is asked about a tile, and looks at the tile's two sides: where the
queries stand, where the keys stand, and the entries that its own arrays hold for them. Everything a side gives is
oriented to the logits `(..., H, T, S)`: query things lie along axis -2, key things along axis -1, so that comparing
the two sides broadcasts to the tile. The same code serves one tile, a grid of tiles, NumPy values and traced ones.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .errors import explain
from .given import is_concrete, kind_of

Rows = Any  # a NumPy or JAX array, oriented to the logits
Axes = tuple[Any, ...]  # lengths: numbers, or symbolic where a program is exported
QUERY_AXIS, KEY_AXIS = -2, -1
POSITION_LIMIT = 2**30  # so that a position minus a window cannot wrap in int32


class Part(NamedTuple):
    """A box of batch axes and heads: where it starts on each of these axes, and how many entries it has there."""

    starts: tuple[Any, ...]
    sizes: tuple[Any, ...]

    def cut(self, array: Any) -> Any:
        """The part of an array whose axes in front are these, or the first of these; an axis of length 1 stays."""
        starts, sizes = [0] * array.ndim, list(array.shape)
        for axis, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if axis < array.ndim and array.shape[axis] != 1 and array.shape[axis] != size:
                starts[axis], sizes[axis] = start, size
        if sizes == list(array.shape):
            return array
        if isinstance(array, np.ndarray) and all(isinstance(start, int) for start in starts):
            return array[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
        return lax.dynamic_slice(jnp.asarray(array), self.at(starts), sizes)

    @staticmethod
    def at(starts: Any) -> list[Any]:
        """Where a slice starts, as `lax` takes it: numbers of one type."""
        return [jnp.asarray(start, jnp.int32) for start in starts]

    @property
    def batch(self) -> "Part":
        """The batch axes alone."""
        return Part(self.starts[:-1], self.sizes[:-1])


@dataclasses.dataclass(frozen=True)
class Side:
    """The queries, or the keys, of a tile (or of a grid of tiles).

    Attributes:
        axis: the axis of the logits that this side lies along.
        ndim: number of axes of the logits.
        batch: number of batch axes of the call.
        positions: where every row of the call stands, `(T,)` or batch axes + `(T,)`; None: row n stands at n.
        start: first row of the tile; may be traced.
        size: rows in the tile.
        tile: rows per tile, when this side stands for a grid of tiles; `span` answers per tile.
        traced: whether rows are counted by traced values (inside a kernel) or by NumPy (for tile lists).
        part: the batch axes and heads that the tile belongs to; None: all.
    """

    axis: int
    ndim: int
    batch: int
    positions: Any
    start: Any
    size: int
    tile: int
    traced: bool
    part: Part | None = None

    @property
    def index(self) -> Rows:
        """The rows of the array that the tile covers."""
        if self.traced:
            return self._orient(lax.iota(jnp.int32, self.size) + jnp.asarray(self.start, jnp.int32))
        return self._orient(np.arange(self.start, self.start + self.size, dtype=np.int32))

    @property
    def position(self) -> Rows:
        """Where the rows of the tile stand in their sequences."""
        return self.index if self.positions is None else self.take(self.positions)

    def take(self, array: Any) -> Rows:
        """The tile's part of an array with one entry per row: `(T,)` or batch axes + `(T,)`."""
        if self.part is not None and array.ndim > 1:
            array = self.part.batch.cut(array)
        return self._orient(self._cut(array, array.ndim - 1))

    def each(self, value: Any) -> Any:
        """A number, or one value per example (batch axes), to compare with `position` or `index`."""
        if np.ndim(value) == 0:
            return value
        if self.part is not None:
            value = self.part.batch.cut(value)
        return value.reshape(value.shape + (1,) * (self.ndim - value.ndim))

    def cut(self, array: Any, other: "Side") -> Rows:
        """The tile's part of an array over the plane: two axes, or all axes of the logits, 1 where it broadcasts."""
        array = array.reshape((1,) * (self.ndim - array.ndim) + array.shape)
        if self.part is not None:
            array = self.part.cut(array)
        return other._cut(self._cut(array, self.ndim + self.axis), self.ndim + other.axis)

    def span(self, rows: Rows) -> tuple[Rows, Rows]:
        """Smallest and largest value in each tile; the last tile reaches back where the size does not divide."""
        axis = self.ndim + self.axis
        if rows.shape[axis] <= 1:  # one value for all rows, or no rows
            return rows, rows
        xp = np if isinstance(rows, np.ndarray) else jnp
        covered = self.rows_of_tiles()
        if self.size % self.tile and self.size > self.tile:
            rows = xp.take(rows, covered.reshape(-1), axis=axis)
        tiles = rows.reshape(*rows.shape[:axis], *covered.shape, *rows.shape[axis + 1 :])
        return tiles.min(axis + 1), tiles.max(axis + 1)

    def rows_of_tiles(self) -> np.ndarray:
        """The rows that each tile of a grid covers, `(tiles, rows of a tile)`."""
        starts = np.arange(-(-self.size // self.tile)) * self.tile
        size = min(self.tile, self.size)
        return np.minimum(starts, self.size - size)[:, None] + np.arange(size)

    def _cut(self, array: Any, axis: int) -> Any:
        whole = isinstance(self.start, int) and self.start == 0 and self.size == array.shape[axis]
        if whole or array.shape[axis] == 1:
            return array
        if isinstance(self.start, int):
            return array[(slice(None),) * axis + (slice(self.start, self.start + self.size),)]
        return lax.dynamic_slice_in_dim(jnp.asarray(array), self.start, self.size, axis)

    def _orient(self, rows: Any) -> Rows:
        lead = rows.shape[:-1] + (1,) * (self.ndim - 2 - (rows.ndim - 1))
        if rows.ndim == 1:
            lead = (1,) * (self.ndim - 2)
        return rows.reshape(*lead, -1, 1) if self.axis == QUERY_AXIS else rows.reshape(*lead, 1, rows.shape[-1])


@dataclasses.dataclass(frozen=True)
class Plane:
    """The (T, S) plane of one call: its axes, and where its queries and keys stand.

    Attributes:
        shape: shape of the logits, `(..., H, T, S)`, or `(T, S)` where there is no head axis.
        q_positions, kv_positions: arrays of rank 1 or batch + 1; None: they count from 0.
        aligned: whether it is known how queries and keys stand to each other: T = S, or `q_positions` was given.
        part: the batch axes and heads that tiles belong to; None: all.
    """

    shape: Axes
    q_positions: Any = None
    kv_positions: Any = None
    aligned: bool = True
    part: Part | None = None

    @classmethod
    def of(cls, shape: Axes, q_positions: Any, kv_positions: Any) -> "Plane":
        """The plane of logits of this shape, with positions as the public functions take them.

        Raises:
            TypeError, ValueError: for positions of a wrong type, shape or range, or `kv_positions` alone.
        """
        if kv_positions is not None and q_positions is None:
            rule = "kv_positions alone leaves open where the queries stand."
            raise ValueError(explain("attention", rule, {}, "Give q_positions too (0: they start at 0)."))
        aligned = shape[-2] == shape[-1] or q_positions is not None
        q_at = _counted("q_positions", q_positions, shape[-2], shape[:-3])
        return cls(shape, q_at, _counted("kv_positions", kv_positions, shape[-1], shape[:-3]), aligned)

    @property
    def batch(self) -> Axes:
        """The batch axes."""
        return self.shape[:-3]

    @property
    def queries(self) -> int:
        """T."""
        return self.shape[-2]

    @property
    def keys(self) -> int:
        """S."""
        return self.shape[-1]

    def check_batch(self, what: str, axes: Axes) -> None:
        """Raises ValueError unless the axes are the batch axes of the call, or broadcast to them."""
        if len(axes) != len(self.batch) or any(n not in (1, b) for n, b in zip(axes, self.batch, strict=True)):
            rule = f"{what} must carry the batch axes of the call in front, or broadcast to them."
            raise ValueError(explain("attention", rule, {"given": axes, "batch axes": self.batch}))

    def whole(self) -> tuple[Side, Side]:
        """Both sides of the plane taken as one tile."""
        return self.tile(0, self.queries, 0, self.keys)

    def tile(self, row: Any, rows: int, column: Any, columns: int) -> tuple[Side, Side]:
        """Both sides of the tile of `rows` × `columns` that starts at (row, column); the start may be traced."""
        side = self._side
        return (
            side(QUERY_AXIS, self.q_positions, row, rows, rows, True),
            side(KEY_AXIS, self.kv_positions, column, columns, columns, True),
        )

    def grid(self, rows: int, columns: int) -> tuple[Side, Side]:
        """Both sides of the plane cut into tiles of `rows` × `columns`, for `bounds`."""
        side = self._side
        return (
            side(QUERY_AXIS, self.q_positions, 0, self.queries, rows, False),
            side(KEY_AXIS, self.kv_positions, 0, self.keys, columns, False),
        )

    def _side(self, axis: int, positions: Any, start: Any, size: int, tile: int, traced: bool) -> Side:
        return Side(axis, len(self.shape), len(self.batch), positions, start, size, tile, traced, self.part)


def _counted(name: str, positions: Any, rows: int, batch: Axes) -> Any:
    """Positions as an int32 array with one entry per row; None stays None (they count from 0)."""
    kind, is_array = kind_of(positions), hasattr(positions, "dtype")
    if kind == "NoneType" or (kind == "i" and not is_array and positions == 0):
        return None
    if kind not in "iu":
        given = f"{positions.dtype}{positions.shape}" if is_array else repr(positions)
        raise TypeError(explain("attention", f"{name} must be an int or an integer array.", {name: given}))
    ends = (np.min(positions, initial=0), np.max(positions, initial=0)) if is_concrete(positions) else (0, 0)
    if not -POSITION_LIMIT <= ends[0] <= ends[1] <= POSITION_LIMIT:
        raise ValueError(explain("attention", f"{name} must lie within ±2^30.", {name: positions}))
    shape = np.shape(positions)
    fits = len(shape) == len(batch) + 1 and all(n in (1, b) for n, b in zip(shape, batch, strict=False))
    if shape and (shape[-1] != rows or not (len(shape) == 1 or fits)):
        rule = f"{name} must be one number, one entry per row, or batch axes in front of the rows."
        raise ValueError(explain("attention", rule, {name: shape, "rows": rows, "batch axes": batch}))
    if shape:
        return positions.astype(np.int32)
    if is_concrete(positions):
        return np.arange(rows, dtype=np.int32) + np.int32(positions)
    return lax.iota(jnp.int32, rows) + positions.astype(jnp.int32)


def over_examples(fn: Callable[..., jax.Array], q: Side, k: Side) -> jax.Array:
    """`fn(q_pos (t, 1), k_pos (1, s))` for every example, oriented to the logits."""
    shape = np.broadcast_shapes(q.position.shape[:-2], k.position.shape[:-2])
    q_pos = jnp.broadcast_to(q.position, (*shape, *q.position.shape[-2:]))
    k_pos = jnp.broadcast_to(k.position, (*shape, *k.position.shape[-2:]))
    for _ in shape:
        fn = jax.vmap(fn)
    return fn(q_pos, k_pos)


def share_an_id(q: Side, k: Side, q_ids: Any, k_ids: Any, pad: Any) -> np.ndarray:
    """Whether two tiles share an id, for every pair of tiles of a grid: ids per tile, then a product of the two."""
    values = np.intersect1d(q_ids, k_ids)
    values = values if pad is None else values[values != pad]
    return (_ids_per_tile(q, q_ids, values) @ _ids_per_tile(k, k_ids, values).swapaxes(-1, -2)) > 0


def _ids_per_tile(side: Side, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`(..., tiles, values)`: 1 where a tile holds the value."""
    tiles = ids.reshape(*ids.shape[:-2], -1)[..., side.rows_of_tiles()]
    present = np.zeros((*tiles.shape[:-1], len(values)), np.float32)
    *lead, tile, row = np.nonzero(np.isin(tiles, values))
    present[(*lead, tile, np.searchsorted(values, tiles[(*lead, tile, row)]))] = 1
    return present
