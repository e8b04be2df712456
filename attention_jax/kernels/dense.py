"""Attention with the whole (T, S) matrix of logits at once: the kernel for short sequences, and for asking for weights.

Time and memory O(T · S). Nothing of that size is kept for the backward pass; it is computed again from (q, k, lse).
"""

import math
from typing import Any, final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .. import dropout
from ..sides import Part
from .call import Cost, Operands, Result, Setting, computing_dtype, flops_of
from .junk import any_junk, clear
from .products import columns, rows_times, to_keys, to_values
from .softmax import finite, hide, only

IN_ONE_LOOP = 2**18  # bytes of the logits of a head, up to which one loop over all heads is quick


@final
class Dense:
    """The dense kernel. All options; the only one that can give weights."""

    name = "dense"

    def forward(self, operands: Operands, setting: Setting) -> Result:
        operands = _computing(operands, computing_dtype(operands))
        if not (setting.hides(operands) and self.in_one_loop(operands, setting)):
            return self._pair_by_pair(operands, setting)
        # |q·k|² is at most Σ q² Σ k², so where that is a number no logit is NaN or inf
        squares = jnp.square(operands.q).sum() * jnp.square(operands.k).sum()
        junk = any_junk(squares) | any_junk(operands.v)
        return lax.cond(junk, self._beside_junk, _at_once, operands, setting)

    def in_one_loop(self, operands: Operands, setting: Setting) -> bool:
        """Whether XLA's CPU compiler makes one loop of a forward pass, which keeps no logits."""
        queries, keys = operands.q.shape[-2], operands.k.shape[-2]
        if not (isinstance(queries, int) and isinstance(keys, int)) or setting.dropping is not None:
            return False
        grouped = operands.q.shape[-3] != operands.k.shape[-3]
        return not grouped and 0 < queries * keys * computing_dtype(operands).itemsize <= IN_ONE_LOOP

    def _beside_junk(self, operands: Operands, setting: Setting) -> Result:
        """Rows that see junk pair by pair; the others as if there were none, so that they keep their bits."""
        k, v = operands.k, operands.v
        quick = _at_once(operands._replace(k=clear(k), v=clear(v)), setting)
        slow = self._pair_by_pair(operands, setting)
        junk = ~(jnp.isfinite(k).all(-1, keepdims=True) & jnp.isfinite(v).all(-1, keepdims=True))
        visible = only(_visible(operands, setting), jnp.ones(setting.plane(operands).shape, k.dtype))
        seen = columns(visible, junk.astype(k.dtype), setting.precision)[..., 0] > 0
        seen |= ~jnp.isfinite(quick.out).all(-1)  # junk of its own, in q or the bias, or a product beyond all numbers
        return Result(jnp.where(seen[..., None], slow.out, quick.out), jnp.where(seen, slow.lse, quick.lse))

    def _pair_by_pair(self, operands: Operands, setting: Setting) -> Result:
        """What a hidden pair holds is replaced, and a row that sees junk gets it."""
        visible = _visible(operands, setting)
        logits = hide(visible, _logits(operands, setting))
        some = _some(visible, logits)
        largest = jnp.max(logits, -1, keepdims=True, initial=-jnp.inf)
        largest = only(some, largest)
        weights = jnp.exp(logits - largest)
        total = weights.sum(-1, keepdims=True)
        total = jnp.where(some, total, jnp.ones_like(total))
        out = (
            to_values(
                _dropped(weights, operands, setting),
                operands.v,
                _guarded(visible, operands, setting),
                setting.precision,
            )
            / total
        )
        lse = jnp.where(some, largest + jnp.log(total), jnp.full_like(total, -jnp.inf))
        return Result(out, lse[..., 0])

    def tangent(self, operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result:
        dtype = computing_dtype(operands)
        operands, tangents = _computing(operands, dtype, setting.guards(operands)), _computing(tangents, dtype)
        visible = _visible(operands, setting)
        weights = _weights(operands, setting, result.lse, visible)
        moved = jnp.zeros_like(weights)
        if tangents.q is not None:
            moved += rows_times(tangents.q, operands.k, setting.precision) * setting.scale
        if tangents.k is not None:
            moved += rows_times(operands.q, tangents.k, setting.precision) * setting.scale
        if tangents.bias is not None:
            moved += tangents.bias
        moved = weights * only(visible, moved)
        lse = moved.sum(-1)
        out = columns(_dropped(moved, operands, setting), operands.v, setting.precision) - lse[..., None] * result.out
        if tangents.v is not None:
            out += to_values(
                _dropped(weights, operands, setting),
                tangents.v,
                _guarded(visible, operands, setting),
                setting.precision,
            )
        return Result(out, lse)

    def backward(
        self, operands: Operands, setting: Setting, result: Result, cotangents: Result, wanted: Operands
    ) -> Operands:
        given, heads = operands, operands.k.shape[-3]
        operands = _computing(operands, computing_dtype(operands), setting.guards(operands))
        visible = _visible(operands, setting)
        weights = _weights(operands, setting, result.lse, visible)
        some = _some(visible, weights)
        out, lse = only(some, cotangents.out), only(some[..., 0], cotangents.lse)
        level = (out * result.out).sum(-1) - lse
        pulled = _dropped(rows_times(out, operands.v, setting.precision), operands, setting)
        logits = only(visible, weights * (pulled - level[..., None]))
        guarded = _guarded(visible, operands, setting)
        grads = Operands(
            q=columns(logits, operands.k, setting.precision) * setting.scale,
            k=to_keys(logits, operands.q, None, heads, setting.precision) * setting.scale,
            v=to_keys(_dropped(weights, operands, setting), out, guarded, heads, setting.precision),
            bias=logits,
        )
        found = zip(grads, given, wanted, strict=True)
        return Operands(*(None if like is None else _sum_to(g, x).astype(x.dtype) for g, x, like in found))

    def refuses(self, weights: bool) -> None:
        return None

    def weights(self, operands: Operands, setting: Setting, lse: Float[Array, "... H T"]) -> Float[Array, "... H T S"]:
        """The weights after the softmax, before dropout; differentiable like any other function."""
        operands = _computing(operands, computing_dtype(operands), setting.guards(operands))
        return _weights(operands, setting, lse, _visible(operands, setting))

    def cost(self, operands: Operands, setting: Setting) -> Cost:
        pairs, size = math.prod(setting.plane(operands).shape), computing_dtype(operands).itemsize
        seen = 1 if setting.hides(operands) else 0  # one byte for each pair: whether it is visible
        peak, gradient_peak = 2 * size + seen, 3 * size + seen * (size + 2)  # read off compiled programs
        if seen and self.in_one_loop(operands, setting):
            peak = 5 * size  # room for the case that there is junk
        return Cost(*flops_of(pairs, operands), pairs * peak, pairs * gradient_peak)


def _at_once(operands: Operands, setting: Setting) -> Result:
    """(out, lse) by arithmetic alone, which XLA's CPU compiler makes one loop of that keeps no logits.

    What is hidden is brought down to -inf by a minimum, not replaced, so q·k and v must have no NaN or inf. Rows that
    see nothing are divided by 1.
    """
    allowed = setting.mask.allows(*setting.sides(operands))
    logits = _logits(operands._replace(bias=None), setting)
    if operands.bias is None:
        bound = jnp.where(allowed, jnp.inf, -jnp.inf).astype(logits.dtype)
        logits = jnp.minimum(logits, jnp.broadcast_to(bound, logits.shape))
    else:
        logits = logits + hide(*jnp.broadcast_arrays(allowed, operands.bias))
    largest = jnp.maximum(logits.max(-1, keepdims=True), jnp.finfo(logits.dtype).min)
    weights = jnp.exp(logits - largest)
    if operands.bias is not None:
        allowed = allowed & (operands.bias != -jnp.inf)
    some = jnp.broadcast_to(allowed.any(-1, keepdims=True), largest.shape)
    total = weights.sum(-1, keepdims=True) + (~some).astype(weights.dtype)
    out = columns(weights, operands.v, setting.precision) / total
    return Result(out, hide(some, largest + jnp.log(total))[..., 0])


def _computing(operands: Operands, dtype: Any, cleared: bool = False) -> Operands:
    cast = Operands(*(x if x is None else x.astype(dtype) for x in operands))
    return Operands(clear(cast.q), clear(cast.k), clear(cast.v), cast.bias) if cleared else cast


def _visible(operands: Operands, setting: Setting) -> Bool[Array, "..."] | None:
    """Which pairs count, as booleans like the logits; None: all."""
    if not setting.hides(operands):
        return None
    visible = jnp.broadcast_to(setting.mask.allows(*setting.sides(operands)), setting.plane(operands).shape)
    return visible if operands.bias is None else visible & (operands.bias != -jnp.inf)


def _guarded(visible: Any, operands: Operands, setting: Setting) -> Any:
    """The visible pairs, where a product must know them."""
    return visible if setting.guards(operands) else None


def _some(visible: Bool[Array, "..."] | None, logits: Float[Array, "... T S"]) -> Bool[Array, "... T 1"]:
    """Which rows see anything."""
    if visible is not None:
        return visible.any(-1, keepdims=True)
    return jnp.full_like(logits[..., :1].sum(-1, keepdims=True), logits.shape[-1] > 0, bool)


def _logits(operands: Operands, setting: Setting) -> Float[Array, "... H T S"]:
    logits = rows_times(operands.q, operands.k, setting.precision) * setting.scale
    return logits if operands.bias is None else logits + operands.bias


def _weights(
    operands: Operands, setting: Setting, lse: Float[Array, "... H T"], visible: Bool[Array, "..."] | None
) -> Float[Array, "... H T S"]:
    """exp(logits - lse), where rows that see nothing have lse -inf."""
    return jnp.exp(hide(visible, _logits(operands, setting) - finite(lse)[..., None]))


def _dropped(weights: Float[Array, "... H T S"], operands: Operands, setting: Setting) -> Float[Array, "... H T S"]:
    if setting.dropping is None:
        return weights
    (seed, rate), (q, k) = setting.dropping, setting.sides(operands)
    kept = dropout.keep(seed, rate, Part((0,) * (weights.ndim - 2), weights.shape[:-2]), q, k)
    return only(kept, weights)


def _sum_to(grad: Float[Array, "..."], like: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gradient summed over the axes that `like` was broadcast along."""
    axes = tuple(n for n, (g, x) in enumerate(zip(grad.shape, like.shape, strict=True)) if g != x)
    return grad.sum(axes, keepdims=True) if axes else grad
