"""`attention_fn`: what Flax's attention layers ask of the function they call, put in terms of `attention`.

Flax lays arrays out as `(..., T, H, D)`, has 0/1 floats for masks, and lets masks and biases broadcast as numpy does.
All of that is turned here, at the edge.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from .dispatch import attention
from .errors import explain
from .given import AnyArray, promoted
from .masks import Causal, Dense


def attention_fn(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S K D"],
    value: Float[Array, "*B S K V"],
    bias: AnyArray | None = None,
    mask: AnyArray | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    input_positions: Int[Array, "*P T"] | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
) -> Float[Array, "*B T H V"]:
    """softmax(query keyᵀ / √D + bias, over the keys that the mask allows) value, per head, in Flax's terms.

    It is for the `attention_fn=` of `flax.nnx.MultiHeadAttention` and `flax.linen.MultiHeadDotProductAttention`. Unlike
    Flax's own function, a query that may attend to nothing gives zeros (Flax's gives the mean of all values), and the
    softmax is always taken in float32 at least. No keyword is ignored: what cannot be granted raises.

    Args:
        query, key, value: as Flax's layers make them; fewer key/value heads K than H are grouped.
        bias: added to the logits `(..., H, T, S)`, to which it broadcasts as numpy does.
        mask: booleans, or numbers of which anything but 0 means "may attend"; broadcasts likewise.
        broadcast_dropout: drop the same weights (T, S) for every example and head; else draw for each.
        dropout_rng: the random key, typed or legacy; needed where weights are dropped.
        dropout_rate: probability of dropping a weight.
        deterministic: no dropout.
        dtype: of the computation and the result; by default what query, key and value promote to.
        precision: of the matrix products, a `jax.lax.Precision`, its name, or a pair of two equal ones.
        module: gets the weights before dropout, `(..., H, T, S)`, sown as "attention_weights" intermediates.
        promote_dtype: NNX's function from `(arrays, dtype=)` to arrays of one dtype, in place of JAX's promotion.
        is_causal: queries see no later keys. With one query and several keys, the step of a cache, it adds nothing to
            the mask, which then says what the cache holds.
        input_positions: where the queries stand, `(T,)` or batch axes + `(T,)`, for `is_causal`; with T = S the keys
            stand there too, else they count from 0.
        force_fp32_for_softmax: granted always.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: refused unless None.

    Raises:
        ValueError: `is_causal` with 1 < T ≠ S and no `input_positions`; dropout without a key; a foreign einsum; two
            different precisions; a module that cannot sow.
        TypeError: integer arrays.

    Example:
        >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8)), is_causal=True).shape
        (1, 3, 8)
    """
    foreign = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, function in foreign.items():
        if function is not None:
            raise ValueError(explain("attention_fn", f"{name} cannot replace the products of this attention."))
    query, key, value = _promoted((query, key, value), dtype, promote_dtype)
    q, k, v = (jnp.swapaxes(x, -3, -2) for x in (query, key, value))
    queries, keys = q.shape[-2], k.shape[-2]
    bias = None if bias is None else _full(bias, q.ndim)
    pairs = None if mask is None else _full(mask if mask.dtype == bool else mask != 0, q.ndim)
    causal = is_causal and not queries == 1 < keys
    positions = (input_positions, input_positions if queries == keys else None)
    dropout = _dropout(dropout_rng, dropout_rate, deterministic)
    with _precision(precision):
        if dropout is not None and broadcast_dropout:
            out = _shared_dropout(q, k, v, pairs, bias, positions, causal, dropout)
        else:
            out = _attend(q, k, v, pairs, bias, positions, causal, dropout=dropout)
        if module is not None:
            weights = _attend(q, k, v, pairs, bias, positions, causal, return_weights=True)[1]
            _sow(module, weights.astype(q.dtype))
    return jnp.swapaxes(out, -3, -2)


def _promoted(arrays: tuple[Array, ...], dtype: Any, promote_dtype: Callable[..., Any] | None) -> tuple[Array, ...]:
    if promote_dtype is not None:
        return promote_dtype(arrays, dtype=dtype)
    if dtype is None:
        dtype = promoted(*(x.dtype for x in arrays))
    return tuple(x.astype(dtype) for x in arrays)


def _full(array: AnyArray, axes: int) -> Array:
    """Leading axes of size 1, as numpy's broadcasting would add them."""
    return jnp.asarray(array).reshape((1,) * (axes - array.ndim) + array.shape)


def _precision(precision: Any) -> AbstractContextManager:
    """The caller's precision for every product traced inside; without one, the precision that is set already."""
    if isinstance(precision, tuple):
        if len(set(precision)) != 1:
            rule = "both sides of a product have the same precision here."
            raise ValueError(explain("attention_fn", rule, {"precision": precision}))
        precision = precision[0]
    if precision is None:
        return nullcontext()
    return jax.default_matmul_precision(precision.name.lower() if isinstance(precision, lax.Precision) else precision)


def _dropout(key: Array | None, rate: Any, deterministic: bool) -> tuple[Any, Array] | None:
    if deterministic or (isinstance(rate, int | float) and rate == 0):
        return None
    if key is None:
        rule = "dropout needs a random key unless deterministic=True."
        raise ValueError(explain("attention_fn", rule, {"dropout_rate": rate}, "dropout_rng=jax.random.key(seed)"))
    return rate, key


def _sow(module: Any, weights: Array) -> None:
    if isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", weights)
    elif hasattr(module, "sow"):
        module.sow("intermediates", "attention_weights", weights)
    else:
        rule = "module must be a Flax module, into which the weights are sown."
        raise ValueError(explain("attention_fn", rule, {"module": type(module).__name__}))


def _shared_dropout(
    q: Array,
    k: Array,
    v: Array,
    pairs: Array | None,
    bias: Array | None,
    positions: Sequence[Array | None],
    causal: bool,
    dropout: tuple[Any, Array],
) -> Array:
    """One pattern (T, S) for every example and head: each is a call of its own with the same key."""
    *batch, heads, _, _ = q.shape
    groups = heads // k.shape[-3]

    def grouped(x: Array | None) -> Array | None:
        """(..., H|1, T, S) as (..., K|1, G|1, T, S)."""
        if x is None:
            return None
        return x.reshape(*x.shape[:-3], *((1, 1) if x.shape[-3] == 1 else (heads // groups, groups)), *x.shape[-2:])

    def rows(x: Array | None) -> Array | None:
        """Positions (T,) or (..., T) as (..., 1, 1, T)."""
        return None if x is None else _full(x.reshape(*x.shape[:-1], 1, 1, x.shape[-1]), len(batch) + 3)

    def one(operands: tuple) -> Array:
        q, k, v, pairs, bias, *positions = operands
        return _attend(q, k, v, pairs, bias, positions, causal, dropout=dropout)

    operands = (
        grouped(q),
        k[..., None, :, :],
        v[..., None, :, :],
        grouped(pairs),
        grouped(bias),
        *map(rows, positions),
    )
    out = _over(len(batch) + 2, one, operands)
    return out.reshape(*batch, heads, *out.shape[-2:])


def _over(axes: int, one: Callable[[tuple], Array], operands: tuple[Array | None, ...]) -> Array:
    """`one` for each entry of the leading axes, along which an operand may have size 1."""
    if axes == 0:
        return one(operands)
    sizes = [None if x is None else x.shape[0] for x in operands]
    size = next((n for n in sizes if n not in (None, 1)), 1)
    mapped = tuple(0 if n == size else None for n in sizes)
    operands = tuple(x if x is None or axis == 0 else x[0] for x, axis in zip(operands, mapped, strict=True))
    return jax.vmap(functools.partial(_over, axes - 1, one), in_axes=(mapped,), axis_size=size)(operands)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    pairs: Array | None,
    bias: Array | None,
    positions: Sequence[Array | None],
    causal: bool,
    **options: Any,
) -> Any:
    mask = None if pairs is None else Dense(pairs)
    if causal:
        mask = Causal() if mask is None else mask & Causal()
    q_positions, kv_positions = positions
    return attention(q, k, v, mask, bias=bias, q_positions=q_positions, kv_positions=kv_positions, **options)
