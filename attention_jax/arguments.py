"""The public door of `attention`: arguments checked and resolved, once, before anything is traced."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import dropout as dropping
from .errors import explain
from .given import is_concrete, promoted
from .kernels.axes import on_same_manual_axes
from .kernels.call import Dropping, Operands, Setting, matmul_precision
from .kernels.junk import clear
from .mask_algebra import as_mask, check_broadcast
from .sides import Axes, Plane

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
LETTERS = {"q": "q (..., H, T, D)", "k": "k (..., K, S, D)", "v": "v (..., K, S, V)"}


class Resolved(NamedTuple):
    """A call of `attention`, resolved.

    Attributes:
        operands, setting: what kernels take; with a head axis in any case.
        grown: whether the output is to be multiplied (dropout), and by what.
        headless: whether the head axis was added.
    """

    operands: Operands
    setting: Setting
    grown: Any
    headless: bool


def resolve(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    *,
    scale: Any,
    bias: Any,
    dropout: Any,
    q_positions: Any,
    kv_positions: Any,
) -> Resolved:
    """Checks the arguments of `attention` and brings them into the form that kernels take."""
    q, k, v = (_floats(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    logits = _logits_shape(q.shape, k.shape, v.shape)
    mask = as_mask(mask)
    headless = len(logits) == 2
    plane = Plane.of(logits, q_positions, kv_positions)
    mask.check(plane)
    if bias is not None:
        bias = _floats("bias", bias)
        check_broadcast("bias", bias.shape, plane)
        bias = bias.reshape((1,) * (max(len(logits), 3) - bias.ndim) + bias.shape)
    q, scale = _scaled(q, scale, logits)
    if headless:
        q, k, v = q[None], k[None], v[None]
    dropped, grown = _dropping(dropout)
    mask = jax.tree.map(lambda x: x if is_concrete(x) else lax.stop_gradient(x), mask)
    setting = Setting(mask, plane.q_positions, plane.kv_positions, dropped, scale, matmul_precision())
    operands, setting = on_same_manual_axes((Operands(q, k, v, bias), setting))
    return Resolved(operands, setting, grown, headless)


def _floats(name: str, x: Any) -> jax.Array:
    """An array of floats; everything else is refused by name."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        rule = f"{name} must be an array, not {type(x).__name__}."
        raise TypeError(explain("attention", rule, {}, f"Make an array of it: jnp.asarray({name})."))
    if x.dtype not in FLOATS:
        rule = f"{name} must hold floats: float16, bfloat16, float32 or float64."
        raise TypeError(explain("attention", rule, {name: f"{x.dtype}{x.shape}"}, f"{name}.astype(jnp.float32)"))
    return x if isinstance(x, jax.Array) else jnp.asarray(x)  # asarray of an array takes 28 µs


def _logits_shape(q: Axes, k: Axes, v: Axes) -> Axes:
    """The shape of the logits; ValueError where the three shapes do not fit each other."""
    rule = _misfit(q, k, v)
    if rule:
        facts = {LETTERS["q"]: q, LETTERS["k"]: k, LETTERS["v"]: v}
        raise ValueError(explain("attention", rule, facts, _layout_hint(q, k, v)))
    return (*q[:-1], k[-2])


def _misfit(q: Axes, k: Axes, v: Axes) -> str:
    """The first rule that the shapes break; empty if none."""
    if not len(q) == len(k) == len(v) or len(q) < 2:
        return "q, k and v must have the same number of axes, two or more."
    if q[-1] != k[-1]:
        return "q and k must have the same width D."
    if k[-2] != v[-2]:
        return "k and v must have the same number of keys S."
    if len(q) == 2:
        return ""
    if k[-3] != v[-3]:
        return "k and v must have the same number of heads K."
    if min(q[-3], k[-3]) < 1:
        return "there must be at least one head."
    if q[-3] % k[-3]:
        return "the query heads H must be a multiple of the key/value heads K."
    if k[:-3] != v[:-3] or (k[:-3] != q[:-3] and any(n != 1 for n in k[:-3])):
        return "the batch axes of k and v must be those of q, or all 1 (shared by the whole batch)."
    return ""


def _layout_hint(q: Axes, k: Axes, v: Axes) -> str:
    if not len(q) == len(k) == len(v):
        return ""
    if len(q) >= 4 and not _misfit(*((*s[:-3], s[-2], s[-3], s[-1]) for s in (q, k, v))):
        return "This looks like (..., T, H, D): swap axes -2 and -3, jnp.swapaxes(x, -2, -3)."
    if len(q) == 3:
        return "Three axes are (H, T, D). Without heads, (B, T, D) needs a head axis: x[..., None, :, :]."
    return ""


def _scaled(q: jax.Array, scale: Any, logits: Axes) -> tuple[jax.Array, float]:
    """A number stays static; an array is multiplied into q, so that it has its gradient."""
    if scale is None:
        return q, 1 / math.sqrt(max(q.shape[-1], 1))
    if isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool):
        if not math.isfinite(scale):
            raise ValueError(explain("attention", "scale must be finite.", {"scale": scale}))
        return q, float(scale)
    scale = _floats("scale", scale)
    full = (*logits[:-1], 1)
    fits = scale.ndim == len(full) and all(n in (1, m) for n, m in zip(scale.shape, full, strict=True))
    if scale.ndim and not fits:
        rule = "scale must be a number, or have all axes of the logits with 1 for the keys."
        raise ValueError(explain("attention", rule, {"scale": scale.shape, "(..., H|1, T|1, 1)": full}))
    wide = promoted(q.dtype, jnp.float32)
    return _times(q.astype(wide), scale.astype(wide)), 1.0


@jax.custom_jvp
def _times(q: jax.Array, scale: jax.Array) -> jax.Array:
    """q · scale, where a NaN in q reaches the gradient of the scale only through a row that has a gradient."""
    return q * scale


@_times.defjvp
def _times_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (q, scale), (d_q, d_scale) = primals, tangents
    return _times(q, scale), _times(d_q, scale) + clear(q) * d_scale


def _dropping(dropout: Any) -> tuple[Dropping | None, Any]:
    """What to drop, and the factor 1/(1-rate) of the output (0 at rate 1)."""
    if dropout is None:
        return None, None
    if not isinstance(dropout, tuple) or len(dropout) != 2:
        rule = "dropout must be a pair (rate, key)."
        raise TypeError(explain("attention", rule, {"dropout": type(dropout).__name__}, "dropout=(0.1, key)"))
    rate, key = dropout
    if is_concrete(rate):
        if np.ndim(rate) or not 0 <= float(rate) <= 1:
            raise ValueError(explain("attention", "the dropout rate must be one number in [0, 1].", {"rate": rate}))
        if rate == 0:
            return None, None
    if not _is_one_key(key):
        rule = "dropout=(rate, key) needs one random key."
        given = f"{key.dtype}{key.shape}" if hasattr(key, "dtype") else type(key).__name__
        remedy = "jax.random.key(seed); of several, one for each call."
        raise TypeError(explain("attention", rule, {"key": given}, remedy))
    rate = jnp.asarray(rate, jnp.float32)
    kept = jnp.where(rate < 1, 1 - rate, jnp.ones_like(rate))
    grown = jnp.where(rate < 1, 1 / kept, jnp.zeros_like(rate))
    return Dropping(dropping.seed_of(key), lax.stop_gradient(rate)), grown


def _is_one_key(key: Any) -> bool:
    """Typed, or the words of a legacy one."""
    if not hasattr(key, "dtype"):
        return False
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return (typed or key.dtype == jnp.uint32) and key.ndim == (0 if typed else 1)
