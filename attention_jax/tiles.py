"""How the (T, S) plane is cut into tiles, and which of them a mask leaves empty or full.

Tiles all have one size. Where it does not divide the length, the last tile reaches back over rows of the one before, so
that nothing is padded and nothing copied.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .given import is_concrete
from .mask_algebra import Mask
from .sides import Plane


class Tiling(NamedTuple):
    """Tiles of `rows` queries × `columns` keys over a plane of T × S."""

    rows: int
    columns: int
    queries: int
    keys: int

    @property
    def down(self) -> int:
        """Tiles below each other."""
        return -(-self.queries // self.rows)

    @property
    def across(self) -> int:
        """Tiles beside each other."""
        return -(-self.keys // self.columns)

    def row(self, i: Any) -> Any:
        """The first query of the tiles in row i of tiles."""
        return _first(i, self.rows, self.queries)

    def column(self, j: Any) -> Any:
        """The first key of the tiles in column j of tiles."""
        return _first(j, self.columns, self.keys)


def _first(n: Any, size: int, whole: int) -> Any:
    if whole % size == 0 or isinstance(n, int):
        return min(n * size, whole - size) if isinstance(n, int) else n * np.int32(size)
    return jnp.minimum(n * np.int32(size), np.int32(whole - size))


class Lists(NamedTuple):
    """The tiles to compute, for each row of tiles.

    Attributes:
        order: columns of tiles, `(..., down, across)`: full tiles first, then partial ones, then those to skip.
        full: how many are full, `(..., down)`: every pair counts, so nothing is masked.
        some: how many are partial.
    """

    order: Any
    full: Any
    some: Any


def bounds_of(mask: Mask, plane: Plane, tiling: Tiling) -> tuple[Any, Any]:
    """(may_any, must_all) of every tile, with all axes of the logits or 1; NumPy's where the mask is concrete."""
    answers = mask.bounds(*plane.grid(tiling.rows, tiling.columns))
    return tuple(_with_axes(answer, len(plane.shape), tiling) for answer in answers)  # pyright: ignore[reportReturnType]


def _with_axes(answer: Any, ndim: int, tiling: Tiling) -> Any:
    xp = np if is_concrete(answer) else jnp
    answer = xp.reshape(xp.asarray(answer), (1,) * (ndim - np.ndim(answer)) + np.shape(answer))
    return xp.broadcast_to(answer, (*answer.shape[:-2], tiling.down, tiling.across))


def lists_of(may_any: Any, must_all: Any, tiling: Tiling) -> Lists:
    """The lists, from the bounds of tiles `(..., down, across)`.

    Keys of a last tile that reaches back are seen by the tile before, so they are hidden there: it is never full.
    """
    xp = np if is_concrete(may_any) and is_concrete(must_all) else jnp
    if tiling.keys % tiling.columns:
        must_all = must_all & (np.arange(tiling.across) < tiling.across - 1)[None]
    full, some = may_any & must_all, may_any & ~must_all
    rank = xp.where(full, np.int32(0), xp.where(some, np.int32(1), np.int32(2)))
    order = xp.argsort(rank, axis=-1, stable=True).astype(np.int32)
    return Lists(order, full.sum(-1, dtype=np.int32), some.sum(-1, dtype=np.int32))
