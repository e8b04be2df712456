"""The definition of scaled dot-product attention, as plainly as it can be written.

`attention_head` is one head on (T, D), (S, D), (S, V) arrays; `attention` is its `vmap` over heads and batch, jitted.
Everything else in this library equals this. It holds the whole (T, S) matrix, so it is the thing to compare with, not
the thing to run.

    weights = softmax(q kᵀ · scale + bias, over the keys that each query may attend to)
    out     = weights v
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class Attended(NamedTuple):
    """What attention gives: outputs, log-sum-exp of each row's logits, weights after the softmax."""

    out: Float[Array, "*axes T V"]
    lse: Float[Array, "*axes T"]
    weights: Float[Array, "*axes T S"]


def attention_head(
    q: Float[Array, "T D"],
    k: Float[Array, "S D"],
    v: Float[Array, "S V"],
    mask: Bool[Array, "T S"] | None = None,
    bias: Float[Array, "T S"] | None = None,
    scale: float | Float[Array, ""] | None = None,
) -> Attended:
    """Softmax(q kᵀ · scale + bias) v for one head.

    A query that may attend to nothing gives zeros, weights 0 and log-sum-exp -inf. What stands at a hidden pair, NaN
    included, counts for nothing; a bias of -inf hides a pair as the mask does.

    Args:
        q, k, v: queries, keys and values.
        mask: True where a query may attend to a key; None: everywhere.
        bias: added to the logits before the mask.
        scale: factor of the products; 1/√D by default.

    Returns:
        `out` in the dtype of `q`; `lse` and `weights` in float32, or float64 where an input is float64.

    Example:
        >>> import jax.numpy as jnp
        >>> q, k, v = jnp.ones((1, 1)), jnp.array([[0.0], [jnp.log(3.0)]]), jnp.array([[4.0], [8.0]])
        >>> print(attention_head(q, k, v).weights.round(2))
        [[0.25 0.75]]

    References:
        Vaswani et al., Attention Is All You Need, 2017, section 3.2.1.
    """
    exact = jnp.float64 if jnp.float64 in (q.dtype, k.dtype, v.dtype) else jnp.float32
    queries, keys, values = (x.astype(exact) for x in (q, k, v))
    factor = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    logits = jnp.matmul(queries, keys.T, precision=lax.Precision.HIGHEST) * jnp.asarray(factor, exact)
    visible = jnp.ones(logits.shape, bool) if mask is None else mask
    if bias is not None:
        visible = visible & (bias != -jnp.inf)
        logits = logits + bias.astype(exact)
    logits = jnp.where(visible, logits, -jnp.inf)
    some = visible.any(-1, keepdims=True)
    largest = jnp.where(some, jnp.max(logits, -1, keepdims=True, initial=-jnp.inf), 0)
    unnormalised = jnp.where(visible, jnp.exp(logits - largest), 0)
    total = jnp.where(some, unnormalised.sum(-1, keepdims=True), 1)
    weights = unnormalised / total
    # a product with 0 would let a hidden NaN through, so hidden terms are replaced, term by term
    out = jnp.where(visible[:, :, None], weights[:, :, None] * values[None], 0).sum(1)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)[:, 0]
    return Attended(out.astype(q.dtype), lse, weights)


@jax.jit
def attention(
    q: Float[Array, "*batch H T D"],
    k: Float[Array, "*batch K S D"],
    v: Float[Array, "*batch K S V"],
    mask: Bool[Array, "..."] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
) -> Attended:
    """`attention_head` for every head and example: its `vmap` over head and batch, jitted.

    Query head h reads key/value head h // (H // K). Any number of batch axes, none included; `(T, D)` arrays are one
    head. `mask` and `bias` broadcast to the logits `(..., H, T, S)`, with as many axes or with two.

    Example:
        >>> import jax.numpy as jnp
        >>> q, kv = jnp.ones((2, 4, 3, 8)), jnp.ones((2, 2, 5, 8))
        >>> attention(q, kv, kv).out.shape
        (2, 4, 3, 8)
    """
    axes = q.shape[:-2]
    if axes:
        group = q.shape[-3] // k.shape[-3]
        k, v = (jnp.repeat(x, group, axis=-3) for x in (k, v))
    logits = (*axes, q.shape[-2], k.shape[-2])
    mask, bias = (
        x if x is None else jnp.broadcast_to(x.reshape((1,) * (len(logits) - x.ndim) + x.shape), logits)
        for x in (mask, bias)
    )
    head = attention_head
    for _ in axes:
        head = jax.vmap(head, in_axes=(0, 0, 0, 0, 0, None))
    return head(q, k, v, mask, bias, scale)
