"""Attention with the whole (T, S) matrix of logits at once: the kernel for short sequences, and for asking for weights.

Time and memory O(T · S). Nothing of that size is kept for the backward pass; it is computed again from (q, k, lse).
"""

import math
from typing import Any, final

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .. import dropout
from .call import Cost, Operands, Setting, computing_dtype
from .junk import clear, give_back
from .rules import Result


@final
class Dense:
    """The dense kernel. All options; the only one that can give weights."""

    name = "dense"

    def forward(self, operands: Operands, setting: Setting) -> Result:
        operands = _computing(operands, computing_dtype(operands))
        visible = _visible(operands, setting)
        logits = _hide(_logits(operands, setting), visible)
        some = _some(visible, logits)
        largest = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
        largest = jnp.where(some, largest, jnp.zeros_like(largest))
        weights = jnp.exp(logits - largest)
        total = weights.sum(-1, keepdims=True)
        total = jnp.where(some, total, jnp.ones_like(total))
        out = _to_values(_dropped(weights, operands, setting), operands.v, visible, setting) / total
        lse = jnp.where(some, largest + jnp.log(total), jnp.full_like(total, -jnp.inf))
        return Result(out, lse[..., 0])

    def tangent(self, operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result:
        dtype = computing_dtype(operands)
        operands, tangents = _computing(operands, dtype, setting.hides(operands)), _computing(tangents, dtype)
        visible = _visible(operands, setting)
        weights = _weights(operands, setting, result.lse, visible)
        moved = jnp.zeros_like(weights)
        if tangents.q is not None:
            moved += _rows_times(tangents.q, operands.k, setting) * setting.scale
        if tangents.k is not None:
            moved += _rows_times(operands.q, tangents.k, setting) * setting.scale
        if tangents.bias is not None:
            moved += tangents.bias
        moved = weights * (moved if visible is None else jnp.where(visible, moved, jnp.zeros_like(moved)))
        lse = moved.sum(-1)
        out = _columns(_dropped(moved, operands, setting), operands.v, setting) - lse[..., None] * result.out
        if tangents.v is not None:
            out += _to_values(_dropped(weights, operands, setting), tangents.v, visible, setting)
        return Result(out, lse)

    def backward(self, operands: Operands, setting: Setting, result: Result, cotangents: Result) -> Operands:
        given, heads = operands, operands.k.shape[-3]
        operands = _computing(operands, computing_dtype(operands), setting.hides(operands))
        visible = _visible(operands, setting)
        weights = _weights(operands, setting, result.lse, visible)
        some = _some(visible, weights)
        out = jnp.where(some, cotangents.out, jnp.zeros_like(cotangents.out))
        lse = jnp.where(some[..., 0], cotangents.lse, jnp.zeros_like(cotangents.lse))
        level = (out * result.out).sum(-1) - lse
        pulled = _dropped(_rows_times(out, operands.v, setting), operands, setting)
        logits = weights * (pulled - level[..., None])
        if visible is not None:
            logits = jnp.where(visible, logits, jnp.zeros_like(logits))
        grads = Operands(
            q=_columns(logits, operands.k, setting) * setting.scale,
            k=_to_keys(logits, operands.q, None, heads, setting) * setting.scale,
            v=_to_keys(_dropped(weights, operands, setting), out, visible, heads, setting),
            bias=logits,
        )
        return Operands(*(None if x is None else _sum_to(g, x) for g, x in zip(grads, given, strict=True)))

    def weights(self, operands: Operands, setting: Setting, lse: Float[Array, "... H T"]) -> Float[Array, "... H T S"]:
        """The weights after the softmax, before dropout; differentiable like any other function."""
        operands = _computing(operands, computing_dtype(operands), setting.hides(operands))
        return _weights(operands, setting, lse, _visible(operands, setting))

    def cost(self, operands: Operands, setting: Setting) -> Cost:
        pairs, size = math.prod(setting.plane(operands).shape), computing_dtype(operands).itemsize
        width = operands.q.shape[-1] + operands.v.shape[-1]
        backward = 2 * pairs * (width + 2 * operands.q.shape[-1] + operands.v.shape[-1]) + pairs
        forward = 2 * pairs * width + pairs
        seen = 1 if setting.hides(operands) else 0  # one byte for each pair: whether it is visible
        peak, gradient_peak = 2 * size + seen, 3 * size + seen * (size + 2)  # read off compiled programs
        return Cost(forward, forward + backward, pairs * peak, pairs * gradient_peak)


def _computing(operands: Operands, dtype: Any, cleared: bool = False) -> Operands:
    cast = Operands(*(x if x is None else x.astype(dtype) for x in operands))
    return Operands(clear(cast.q), clear(cast.k), clear(cast.v), cast.bias) if cleared else cast


def _visible(operands: Operands, setting: Setting) -> Bool[Array, "..."] | None:
    """Which pairs count, as booleans like the logits; None: all."""
    if not setting.hides(operands):
        return None
    plane = setting.plane(operands)
    visible = jnp.broadcast_to(setting.mask.allows(*plane.whole()), plane.shape)
    return visible if operands.bias is None else visible & (operands.bias != -jnp.inf)


def _some(visible: Bool[Array, "..."] | None, logits: Float[Array, "... T S"]) -> Bool[Array, "... T 1"]:
    """Which rows see anything."""
    if visible is not None:
        return visible.any(-1, keepdims=True)
    return jnp.full_like(logits[..., :1].sum(-1, keepdims=True), logits.shape[-1] > 0, bool)


def _logits(operands: Operands, setting: Setting) -> Float[Array, "... H T S"]:
    logits = _rows_times(operands.q, operands.k, setting) * setting.scale
    return logits if operands.bias is None else logits + operands.bias


def _hide(logits: Float[Array, "..."], visible: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    return logits if visible is None else jnp.where(visible, logits, jnp.full_like(logits, -jnp.inf))


def _weights(
    operands: Operands, setting: Setting, lse: Float[Array, "... H T"], visible: Bool[Array, "..."] | None
) -> Float[Array, "... H T S"]:
    """exp(logits - lse), where rows that see nothing have lse -inf."""
    level = jnp.where(lse == -jnp.inf, jnp.zeros_like(lse), lse)[..., None]
    return jnp.exp(_hide(_logits(operands, setting) - level, visible))


def _dropped(weights: Float[Array, "... H T S"], operands: Operands, setting: Setting) -> Float[Array, "... H T S"]:
    if setting.dropping is None:
        return weights
    (seed, rate), (q, k) = setting.dropping, setting.plane(operands).whole()
    kept = dropout.keep(seed, rate, weights.shape[:-2], q, k)
    return jnp.where(kept, weights, jnp.zeros_like(weights))


# Products. Heads that share keys stand below each other: (..., H, T, n) is read as (..., K, H/K · T, n).


def _rows_times(
    x: Float[Array, "... H T n"], y: Float[Array, "... K S n"], setting: Setting
) -> Float[Array, "... H T S"]:
    """x yᵀ, every row with the keys or values of its group."""
    product = jnp.einsum("...tn,...sn->...ts", _stack(x, y.shape[-3]), y, precision=setting.precision)
    return product.reshape(*product.shape[:-3], *x.shape[-3:-1], y.shape[-2])


def _columns(x: Float[Array, "... H T S"], y: Float[Array, "... K S n"], setting: Setting) -> Float[Array, "... H T n"]:
    """x y, every row with the keys or values of its group."""
    product = jnp.einsum("...ts,...sn->...tn", _stack(x, y.shape[-3]), y, precision=setting.precision)
    return product.reshape(*product.shape[:-3], *x.shape[-3:-1], y.shape[-1])


def _to_values(
    weights: Float[Array, "... H T S"],
    v: Float[Array, "... K S V"],
    visible: Bool[Array, "..."] | None,
    setting: Setting,
) -> Float[Array, "... H T V"]:
    """weights v, where what a row does not see in v does not reach it."""
    if visible is None:
        return _columns(weights, v, setting)
    out = _stack(_columns(weights, clear(v), setting), v.shape[-3])
    out = give_back(out, _stack(visible, v.shape[-3]), v, setting.precision)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def _to_keys(
    weights: Float[Array, "... H T S"],
    x: Float[Array, "... H T n"],
    visible: Bool[Array, "..."] | None,
    heads: int,
    setting: Setting,
) -> Float[Array, "... K S n"]:
    """weightsᵀ x, summed over the heads of a group; what stands in a row reaches only what the row sees."""
    weights, x = _stack(weights, heads), _stack(x, heads)
    if visible is None:
        return jnp.einsum("...ts,...tn->...sn", weights, x, precision=setting.precision)
    out = jnp.einsum("...ts,...tn->...sn", weights, clear(x), precision=setting.precision)
    return give_back(out, _stack(visible, heads).swapaxes(-1, -2), x, setting.precision)


def _stack(x: Array, heads: int) -> Array:
    """(..., H, T, n) as (..., K, H/K · T, n)."""
    return (
        x if x.shape[-3] == heads else x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads * x.shape[-2], x.shape[-1])
    )


def _sum_to(grad: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gradient summed over the axes that `like` was broadcast along."""
    axes = tuple(n for n, (g, x) in enumerate(zip(grad.shape, like.shape, strict=True)) if g != x)
    return (grad.sum(axes, keepdims=True) if axes else grad).astype(like.dtype)
