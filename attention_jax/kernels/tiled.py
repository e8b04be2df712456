"""Attention in memory linear in T: tile by tile with a running softmax, in plain jax.numpy and lax.

The loops are a primitive of their own, for two reasons. How they go is known only when a program is lowered: on one
processor part after part, small enough for its cache; where arrays are spread over devices all parts at once. And
`vmap` of a loop whose length differs between examples would compute the longest for all: mapped axes become axes of the
loop.
"""

import functools
import math
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ..mask_algebra import Mask
from ..masks import Segments, Window
from ..sides import Part
from ..tiles import Tiling
from . import loops
from .axes import on_same_manual_axes
from .call import Cost, Operands, Result, Setting, computing_dtype, flops_of
from .dense import Dense
from .sweep import Sweep

LOGITS_AT_ONCE = 2**20  # of one step: 4 MiB, of the size of a processor's cache
HEADS_AT_ONCE = 16
NARROW = 1024  # keys of a window


@final
class Tiled:
    """The tiled kernel. All options but the weights.

    Attributes:
        tile: queries and keys of a tile; None: chosen by lengths and mask.
    """

    name = "tiled"

    def __init__(self, tile: tuple[int, int] | None = None) -> None:
        self.tile = tile

    def forward(self, operands: Operands, setting: Setting) -> Result:
        q, v = operands.q, operands.v
        if _has_nothing(operands):
            return Dense().forward(operands, setting)
        dtype = computing_dtype(operands)
        empty = Result(jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype), jnp.zeros(q.shape[:-1], dtype))
        return self._bind("forward", (operands, setting), empty)

    def tangent(self, operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result:
        if _has_nothing(operands):
            return Dense().tangent(operands, setting, result, tangents)
        return self._bind("tangent", (operands, setting, result, tangents), Result(*map(jnp.zeros_like, result)))

    def backward(
        self, operands: Operands, setting: Setting, result: Result, cotangents: Result, wanted: Operands
    ) -> Operands:
        if _has_nothing(operands):
            return Dense().backward(operands, setting, result, cotangents, wanted)
        dtype = computing_dtype(operands)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), operands._replace(bias=wanted.bias))
        grads = self._bind("backward", (operands, setting, result, cotangents), empty)
        return Operands(*(None if x is None else g.astype(x.dtype) for g, x in zip(grads, wanted, strict=True)))

    def _bind(self, what: str, given: tuple[Any, ...], empty: Any) -> Any:
        leaves, tree = jax.tree.flatten(on_same_manual_axes((*given, empty)))
        static = {"what": what, "tree": tree, "tile": self.tile, "mapped": ()}
        return jax.tree.unflatten(jax.tree.structure(empty), loops_p.bind(*leaves, **static))

    def cost(self, operands: Operands, setting: Setting) -> Cost:
        if _has_nothing(operands):
            return Dense().cost(operands, setting)
        sweep = _sweep(operands, setting, self.tile, 0, (), by_parts=True)
        tiling, size = sweep.tiling, computing_dtype(operands).itemsize
        computed, of = sweep.count()
        keys = math.prod((*sweep.sizes, tiling.keys)) * (operands.k.shape[-1] + operands.v.shape[-1])
        step = math.prod(sweep.queries_of(Part((0,) * len(sweep.sizes), sweep.sizes)).sizes) * tiling.rows
        logits, rows = step * tiling.columns, step * (operands.q.shape[-1] + 2 * operands.v.shape[-1])
        kept = math.prod(operands.q.shape[:-1]) * (operands.v.shape[-1] + 1)
        peak, gradient_peak = 2 * logits + rows, 3 * logits + 2 * rows + keys + kept // 2
        narrow = sum(math.prod(x.shape) for x in operands[:3] if x.dtype.itemsize < size)
        if narrow:  # the compiler widens whole arrays ahead of the loops, and the results are narrowed behind them
            peak, gradient_peak = peak + narrow + kept, gradient_peak + 2 * narrow
        flops = flops_of(computed * tiling.rows * tiling.columns, operands)
        return Cost(*flops, size * peak, size * gradient_peak, (computed, of))

    def refuses(self, weights: bool) -> str | None:
        return "it never holds the weights; 'dense' gives them" if weights else None

    def weights(self, operands: Operands, setting: Setting, lse: Any) -> Any:
        raise AssertionError("refused")


def _has_nothing(operands: Operands) -> bool:
    """Whether an axis has no entry, so that there are no tiles."""
    return any(isinstance(n, int) and n == 0 for x in (operands.q, operands.k, operands.v) for n in x.shape)


# The primitive. Its arrays are the leaves of `tree`: what a function of `loops` is given, then zeros of the shape of
# its results. `mapped` is as in `rules`: one tuple per `vmap`, innermost first, that says which arrays are mapped.
loops_p = Primitive("attention_loops")
loops_p.multiple_results = True


def _run(*arrays: Any, what: str, tree: Any, tile: Any, mapped: Any, by_parts: bool) -> list[Any]:
    sizes = tuple(
        next(x.shape[_axis(mapped, level, n)] for n, x in enumerate(arrays) if mapped[level][n])
        for level in reversed(range(len(mapped)))
    )
    arrays = tuple(_with_mapped_axes(x, [level[n] for level in reversed(mapped)]) for n, x in enumerate(arrays))
    operands, setting, *rest, empty = jax.tree.unflatten(tree, arrays)
    sweep = _sweep(operands, setting, tile, len(sizes), sizes, by_parts)
    dtype = computing_dtype(operands)
    walk: Any = {"forward": loops.forward, "tangent": loops.tangent, "backward": loops.backward}[what]
    return jax.tree.leaves(walk(sweep, operands, setting, *rest, empty, dtype))


def _sweep(
    operands: Operands, setting: Setting, tile: Any, mapped: int, sizes: tuple[Any, ...], by_parts: bool
) -> Sweep:
    """The walk; `sizes` are those of mapped axes, which stand in front of all arrays."""
    heads, kv_heads = operands.q.shape[-3], operands.k.shape[-3]
    lead = (*sizes, *operands.q.shape[mapped:-3])
    tiling = _tiling(tile, setting.mask, operands.q.shape[-2], operands.k.shape[-2], None if by_parts else lead)
    parts = _part_sizes(lead, heads, kv_heads, tiling) if by_parts else (*lead, kv_heads)
    return Sweep(
        setting,
        mapped=mapped,
        lead=lead,
        heads=heads,
        kv_heads=kv_heads,
        tiling=tiling,
        sizes=parts,
        biased=operands.bias is not None,
    )


def _axis(mapped: Any, level: int, n: int) -> int:
    """Where the axis of a mapped level stands in array n: outer levels stand in front."""
    return sum(outer[n] for outer in mapped[level + 1 :])


def _with_mapped_axes(x: Any, flags: list[bool]) -> Any:
    """`x` with an axis for each level, outermost first; 1 long where it is not mapped."""
    own = iter(x.shape)
    return x.reshape(*[next(own) if flag else 1 for flag in flags], *own)


def _tiling(tile: Any, mask: Mask, queries: int, keys: int, lead: tuple[Any, ...] | None) -> Tiling:
    """Tiles as large as is quick, and smaller where a mask has much to skip."""
    if tile is None:
        side = min(_side(mask), 512 if lead is None else 256)
        tile = tuple(n if n <= 384 and side > 128 else side for n in (queries, keys))
    return Tiling(min(tile[0], queries), min(tile[1], keys), queries, keys)


def _side(mask: Mask) -> int:
    """Of the tiles that suit a mask: what is narrow wants small ones."""
    if isinstance(mask, Segments):
        return 128
    if isinstance(mask, Window) and mask.left is not None and mask.right is not None:
        return 256 if mask.left + mask.right < NARROW else 512
    return min((_side(x) for x in vars(mask).values() if isinstance(x, Mask)), default=512)


def _part_sizes(lead: tuple[Any, ...], heads: int, kv_heads: int, tiling: Tiling) -> tuple[Any, ...]:
    """As many heads at once as make a step of a good size, of the last axes first."""
    group = heads // kv_heads
    left = max(1, min(HEADS_AT_ONCE, LOGITS_AT_ONCE // (tiling.rows * tiling.columns)) // group)
    sizes = []
    for n in (kv_heads, *reversed(lead)):
        size = 1 if not isinstance(n, int) else max(m for m in range(1, left + 1) if n % m == 0)
        sizes.append(size)
        left = left // size if size == n else 1
    return tuple(reversed(sizes))


def _lower(ctx: Any, *arrays: Any, **static: Any) -> Any:
    """By parts where all of every array is on one processor; at once where it may be spread."""
    run = functools.partial(_run, by_parts=_is_alone(ctx.module_context))
    return mlir.lower_fun(run, multiple_results=True)(ctx, *arrays, **static)


def _is_alone(context: Any) -> bool:
    if tuple(context.platforms) != ("cpu",):
        return False
    axes = context.axis_context
    if hasattr(axes, "num_devices"):
        return axes.num_devices == 1
    mesh, manual = getattr(axes, "mesh", None), getattr(axes, "manual_axes", frozenset())
    return mesh is not None and frozenset(mesh.axis_names) == frozenset(manual)


_STATIC = ("what", "tree", "tile", "mapped")
loops_p.def_impl(jax.jit(loops_p.bind, static_argnames=_STATIC))
mlir.register_lowering(loops_p, _lower)


@loops_p.def_abstract_eval
def _avals(*arrays: Any, tree: Any, what: str, **_: Any) -> list[Any]:
    results = jax.tree.unflatten(tree, arrays)[-1]
    return [x.update(weak_type=False) for x in jax.tree.leaves(results)]


def _batch(arrays: Any, dims: Any, **static: Any) -> tuple[list[Any], list[int]]:
    """`vmap`: mapped axes go in front; results are mapped in any case."""
    flags = [dim is not None for dim in dims]
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
    count = len(jax.tree.leaves(jax.tree.unflatten(static["tree"], [0] * len(arrays))[-1]))
    moved = [jnp.moveaxis(x, dim, 0) if there else x for x, dim, there in zip(arrays, dims, flags, strict=True)]
    for n in range(len(moved) - count, len(moved)):
        moved[n] = moved[n] if flags[n] else jnp.broadcast_to(moved[n][None], (size, *moved[n].shape))
        flags[n] = True
    out = loops_p.bind(*moved, **(static | {"mapped": (*static["mapped"], tuple(flags))}))
    return out, [0] * len(out)


batching.primitive_batchers[loops_p] = _batch
