"""Products of one tile, or of the whole plane: logits from rows, rows from weights, keys' gradients from both.

Heads that share keys stand below each other in a product: (..., H, T, n) is read as (..., K, H/K · T, n). What a row
does not see does not reach it, whatever it is: see `junk`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .junk import clear, give_back


def rows_times(x: Float[Array, "... H T n"], y: Float[Array, "... K S n"], precision: Any) -> Float[Array, "... H T S"]:
    """x yᵀ, every row with the keys or values of its group."""
    product = jnp.einsum("...tn,...sn->...ts", stack(x, y.shape[-3]), y, precision=precision)
    return product.reshape(*product.shape[:-3], *x.shape[-3:-1], y.shape[-2])


def columns(x: Float[Array, "... H T S"], y: Float[Array, "... K S n"], precision: Any) -> Float[Array, "... H T n"]:
    """x y, every row with the keys or values of its group."""
    product = jnp.einsum("...ts,...sn->...tn", stack(x, y.shape[-3]), y, precision=precision)
    return product.reshape(*product.shape[:-3], *x.shape[-3:-1], y.shape[-1])


def to_values(
    weights: Float[Array, "... H T S"],
    v: Float[Array, "... K S V"],
    visible: Bool[Array, "..."] | None,
    precision: Any,
) -> Float[Array, "... H T V"]:
    """weights v, where what a row does not see in v does not reach it."""
    if visible is None:
        return columns(weights, v, precision)
    out = stack(columns(weights, clear(v), precision), v.shape[-3])
    out = give_back(out, stack(visible, v.shape[-3]), v, precision)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def to_keys(
    weights: Float[Array, "... H T S"],
    x: Float[Array, "... H T n"],
    visible: Bool[Array, "..."] | None,
    heads: int,
    precision: Any,
) -> Float[Array, "... K S n"]:
    """weightsᵀ x, summed over the heads of a group; what stands in a row reaches only what the row sees."""
    weights, x = stack(weights, heads), stack(x, heads)
    if visible is None:
        return jnp.einsum("...ts,...tn->...sn", weights, x, precision=precision)
    out = jnp.einsum("...ts,...tn->...sn", weights, clear(x), precision=precision)
    return give_back(out, stack(visible, heads).swapaxes(-1, -2), x, precision)


def stack(x: Array, heads: int) -> Array:
    """(..., H, T, n) as (..., K, H/K · T, n)."""
    return (
        x if x.shape[-3] == heads else x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads * x.shape[-2], x.shape[-1])
    )
