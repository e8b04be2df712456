"""Attention tile by tile: forward, its tangent and its transpose, as loops that keep nothing of size T × S.

Each walks as `sweep` says. Rows of a tile meet the tiles of keys one after the other. The two derivatives compute the
weights again, from the log-sum-exp of the whole row.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..sides import Part
from ..tiles import Lists
from .call import Operands, Result, Setting
from .junk import KINDS, any_junk, clear, given_back, mark, marks
from .products import columns, rows_times, stack
from .softmax import RunningSoftmax, finite, hide, only
from .sweep import Row, Sweep, Tile, add, loop


def forward(sweep: Sweep, operands: Operands, setting: Setting, empty: Result, dtype: Any) -> Result:
    """(out, lse) of all rows, written into `empty`."""
    q, k, v, bias = operands
    precision = setting.precision
    junk = any_junk(v) if sweep.masked else None

    def of_part(part: Part, results: tuple[Array, Array]) -> tuple[Array, Array]:
        lists = sweep.lists(part)

        def of_row(row: Row, results: tuple[Array, Array]) -> tuple[Array, Array]:
            queries = sweep.rows(q, row).astype(dtype) * setting.scale

            def meet(tile: Tile, softmax: RunningSoftmax) -> RunningSoftmax:
                keys, values = (sweep.keys(x, tile).astype(dtype) for x in (k, v))
                logits, visible = _logits(sweep, queries, keys, bias, tile, precision)
                values = clear(values) if sweep.masked else values
                return softmax.add(hide(visible, logits), values, sweep.kept(tile), precision)

            start = RunningSoftmax.start(_spread(queries, sweep, part), v.shape[-1])
            out, lse = sweep.over_keys(lists, row, meet, start).result()
            if junk is not None:
                see = functools.partial(_seen_by_rows, sweep, lists, row, v, bias, precision)
                out = lax.cond(junk, see, _same, out)
            return tuple(sweep.put_rows(x, new, row) for x, new in zip(results, (out, lse), strict=True))

        return sweep.over_rows(part, of_row, results)

    out, lse = sweep.over_parts(of_part, (empty.out, empty.lse[..., None]))
    return Result(out, lse[..., 0])


def tangent(
    sweep: Sweep, operands: Operands, setting: Setting, result: Result, tangents: Operands, empty: Result, dtype: Any
) -> Result:
    """The derivative of (out, lse) along tangents: Σ p ṡ v + Σ p v̇ - (Σ p ṡ) out, and Σ p ṡ; written into `empty`."""
    q, k, v, bias = operands
    precision, scale = setting.precision, setting.scale
    out, lse = result.out, result.lse[..., None]
    junk = any_junk(tangents.v) if sweep.masked and tangents.v is not None else None
    cleared = clear if sweep.masked else _same

    def of_part(part: Part, results: tuple[Array, Array]) -> tuple[Array, Array]:
        lists = sweep.lists(part)

        def of_row(row: Row, results: tuple[Array, Array]) -> tuple[Array, Array]:
            cut = lambda x: None if x is None else sweep.rows(x, row).astype(dtype)  # noqa: E731
            queries, queries_dot = sweep.rows(q, row).astype(dtype) * scale, cut(tangents.q)
            out_row, level = sweep.rows(out, row), finite(sweep.rows(lse, row))

            def meet(tile: Tile, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                take = lambda x: None if x is None else sweep.keys(x, tile).astype(dtype)  # noqa: E731
                keys, values = (sweep.keys(x, tile).astype(dtype) for x in (k, v))
                keys_dot, values_dot = take(tangents.k), take(tangents.v)
                logits, visible = _logits(sweep, queries, keys, bias, tile, precision)
                weights = only(visible, jnp.exp(logits - level))
                moved = jnp.zeros_like(weights)
                if queries_dot is not None:
                    moved += rows_times(queries_dot, cleared(keys), precision) * scale
                if keys_dot is not None:
                    moved += rows_times(cleared(queries), keys_dot, precision)
                if tangents.bias is not None:
                    moved += sweep.pairs(tangents.bias, tile).astype(dtype)
                moved, kept = weights * only(visible, moved), sweep.kept(tile)
                along, total = sums
                along += columns(only(kept, moved), cleared(values), precision)
                if values_dot is not None:
                    along += columns(only(kept, weights), cleared(values_dot), precision)
                return along, total + moved.sum(-1, keepdims=True)

            start = jnp.zeros_like(_spread(out_row, sweep, part))
            along, total = sweep.over_keys(lists, row, meet, (start, jnp.zeros_like(start[..., :1])))
            if junk is not None:
                see = functools.partial(_seen_by_rows, sweep, lists, row, tangents.v, bias, precision)
                along = lax.cond(junk, see, _same, along)
            rows = along - total * out_row, total
            return tuple(sweep.put_rows(x, new, row) for x, new in zip(results, rows, strict=True))

        return sweep.over_rows(part, of_row, results)

    along, total = sweep.over_parts(of_part, (empty.out, empty.lse[..., None]))
    return Result(along, total[..., 0])


def backward(
    sweep: Sweep, operands: Operands, setting: Setting, result: Result, cotangents: Result, empty: Operands, dtype: Any
) -> Operands:
    """The transpose of `tangent`: gradients by q, k, v and bias, added to `empty`.

    Gradients of keys and values are summed transposed, so that no product has its left side the wrong way round.
    """
    q, k, v, bias = operands
    precision, scale = setting.precision, setting.scale
    lse, up, up_lse = result.lse[..., None], cotangents.out, cotangents.lse[..., None]
    junk = any_junk(up) if sweep.masked else None
    cleared = clear if sweep.masked else _same

    def of_part(part: Part, grads: Operands) -> Operands:
        lists = sweep.lists(part)

        def of_row(row: Row, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            d_q, *summed = carry
            queries = sweep.rows(q, row).astype(dtype) * scale
            up_row, level, lse_row = _pulled_rows(sweep, row, result.out, lse, up, up_lse)
            turn = lambda x: _turned(only(sweep.fresh_rows(row), cleared(_spread(x, sweep, part))), sweep)  # noqa: E731
            queries_t, up_t = turn(queries), turn(up_row)

            def meet(tile: Tile, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                d_row, d_k, d_v, d_bias = sums
                keys, values = (sweep.keys(x, tile).astype(dtype) for x in (k, v))
                logits, visible = _logits(sweep, queries, keys, bias, tile, precision)
                weights, kept = only(visible, jnp.exp(logits - lse_row)), sweep.kept(tile)
                d_weights = only(kept, rows_times(up_row, values, precision))
                d_logits = only(visible, weights * (d_weights - level))
                if d_bias is not None:
                    d_bias = sweep.add_pairs(d_bias, only(sweep.fresh_rows(row), d_logits), tile)
                d_row += columns(d_logits, cleared(keys), precision)
                d_k = _add_keys(d_k, _times_pairs(queries_t, d_logits, precision), tile, sweep)
                d_v = _add_keys(d_v, _times_pairs(up_t, only(kept, weights), precision), tile, sweep)
                return d_row, d_k, d_v, d_bias

            start = jnp.zeros_like(_spread(queries, sweep, part))
            d_row, *summed = sweep.over_keys(lists, row, meet, (start, *summed))
            return sweep.put_rows(d_q, d_row * scale, row), *summed

        turned = [_zeros(q, (*part.sizes, x.shape[-1], sweep.tiling.keys), dtype) for x in (k, v)]
        d_q, *turned, d_bias = sweep.over_rows(part, of_row, (grads.q, *turned, grads.bias))
        d_k, d_v = (x.swapaxes(-1, -2) for x in turned)
        if junk is not None:
            see = functools.partial(_seen_by_keys, sweep, lists, part, up, lse, bias, precision)
            d_v = lax.cond(junk, see, _same, d_v)
        return Operands(d_q, add(grads.k, d_k, part), add(grads.v, d_v, part), d_bias)

    return sweep.over_parts(of_part, empty)


def _pulled_rows(
    sweep: Sweep, row: Row, out: Array, lse: Array, up: Array, up_lse: Array
) -> tuple[Float[Array, "... t V"], Float[Array, "... t 1"], Float[Array, "... t 1"]]:
    """Of a row of tiles: the cotangent of out, what is subtracted from that of a weight, and a finite lse.

    Rows that see nothing pull nothing.
    """
    out, lse, up, up_lse = (sweep.rows(x, row) for x in (out, lse, up, up_lse))
    live = lse != -jnp.inf
    up, up_lse = only(live, up), only(live, up_lse)
    return up, (up * out).sum(-1, keepdims=True) - up_lse, finite(lse)


def _logits(
    sweep: Sweep, queries: Array, keys: Array, bias: Any, tile: Tile, precision: Any
) -> tuple[Float[Array, "... H t s"], Any]:
    """Logits of a tile, and which of them count; None: all."""
    logits = rows_times(queries, keys, precision)
    if bias is not None:
        bias = sweep.pairs(bias, tile).astype(logits.dtype)
        logits = logits + bias
    return logits, sweep.visible(tile, bias)


def _seen_by_rows(sweep: Sweep, lists: Lists, row: Row, v: Array, bias: Any, precision: Any, out: Array) -> Array:
    """`out` of a row of tiles, with the junk of the values that its rows see."""

    def see(tile: Tile, seen: Array) -> Array:
        junk = marks(sweep.keys(v, tile).astype(out.dtype))
        return seen + columns(_visible(sweep, tile, bias, out), junk, precision)

    seen = jnp.concatenate([jnp.zeros_like(out)] * KINDS, axis=-1)
    return given_back(out, *jnp.split(sweep.over_keys(lists, row, see, seen) > 0, KINDS, axis=-1))


def _seen_by_keys(
    sweep: Sweep, lists: Lists, part: Part, up: Array, lse: Array, bias: Any, precision: Any, d_v: Array
) -> Array:
    """Gradients of a part's values, with the junk of the cotangents of the rows that see them.

    One kind of junk after the other: the sums are as large as the gradients.
    """

    def of_kind(kind: Any, found: Array) -> Array:
        def of_row(row: Row, seen: Array) -> Array:
            up_row = only(sweep.rows(lse, row) != -jnp.inf, sweep.rows(up, row).astype(d_v.dtype))
            up_t = _turned(only(sweep.fresh_rows(row), mark(_spread(up_row, sweep, part), kind)), sweep)

            def see(tile: Tile, seen: Array) -> Array:
                pairs = _visible(sweep, tile, bias, up_row)
                return _add_keys(seen, _times_pairs(up_t, pairs, precision), tile, sweep)

            return sweep.over_keys(lists, row, see, seen)

        seen = sweep.over_rows(part, of_row, jnp.zeros_like(d_v.swapaxes(-1, -2)))
        return found + (seen > 0).astype(jnp.int8) * jnp.left_shift(np.int8(1), kind.astype(jnp.int8))

    found = loop(0, KINDS, of_kind, jnp.zeros_like(d_v.swapaxes(-1, -2), dtype=jnp.int8))
    found = found.swapaxes(-1, -2)
    return given_back(d_v, *((found & np.int8(1 << kind)) > 0 for kind in range(KINDS)))


def _visible(sweep: Sweep, tile: Tile, bias: Any, like: Array) -> Float[Array, "... H t s"]:
    """1 where a pair of a tile counts, else 0."""
    shape = (*sweep.queries_of(tile.part).sizes, sweep.tiling.rows, sweep.tiling.columns)
    bias = None if bias is None else sweep.pairs(bias, tile).astype(like.dtype)
    return only(sweep.visible(tile, bias), jnp.broadcast_to(jnp.ones_like(like[..., :1]), shape))


def _zeros(like: Array, shape: tuple[Any, ...], dtype: Any) -> Array:
    """Zeros that vary over the devices that `like` varies over."""
    return jnp.broadcast_to(jnp.zeros_like(like.reshape(-1)[0], dtype=dtype), shape)


def _spread(x: Array, sweep: Sweep, part: Part) -> Array:
    """A tile's rows with all the axes of the part, where the array is shared."""
    return jnp.broadcast_to(x, (*sweep.queries_of(part).sizes, *x.shape[-2:]))


def _turned(x: Float[Array, "... H t n"], sweep: Sweep) -> Float[Array, "... K n r"]:
    group = sweep.heads // sweep.kv_heads
    return stack(x, x.shape[-3] // group).swapaxes(-1, -2)


def _times_pairs(
    x: Float[Array, "... K n r"], pairs: Float[Array, "... H t s"], precision: Any
) -> Float[Array, "... K n s"]:
    return jnp.einsum("...nr,...rs->...ns", x, stack(pairs, x.shape[-3]), precision=precision)


def _add_keys(x: Float[Array, "... K n S"], block: Float[Array, "... K n s"], tile: Tile, sweep: Sweep) -> Array:
    """`x` with the keys of a tile added."""
    if x.shape == block.shape:
        return x + block
    start = sweep.tiling.column(tile.j)
    old = lax.dynamic_slice_in_dim(x, start, sweep.tiling.columns, -1)
    return lax.dynamic_update_slice_in_dim(x, old + block, start, -1)


def _same(x: Any) -> Any:
    return x
