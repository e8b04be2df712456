"""Products that let no NaN or inf through at a hidden pair.

0 · NaN is NaN, so a weight of 0 does not hide what it multiplies. Junk is therefore cleared before a product, and rows
that really see it get it back afterwards. Whether there is any junk is one flag, and the product itself is the same in
both cases, so that rows which see none keep their bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float


def clear(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x` with 0 for NaN and inf."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@custom_vmap
def any_junk(x: jax.Array) -> jax.Array:
    """Whether any entry is NaN or inf. Under `vmap` the question is asked of all examples at once, so that a branch
    on the answer stays a branch."""
    return ~jnp.isfinite(x).all()


@any_junk.def_vmap
def _any_junk_mapped(axis_size: int, in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return any_junk(x), False


def give_back(
    out: Float[Array, "... a d"], visible: Bool[Array, "... a b"], x: Float[Array, "... b d"], precision: Any
) -> Float[Array, "... a d"]:
    """`out`, a product over b with the cleared `x`, where rows that see junk in `x` get what it would have given.

    Args:
        out: the product of weights and `clear(x)`.
        visible: which terms the sum really has.
        x: as it was.
        precision: of the products.
    """

    def put(out: jax.Array) -> jax.Array:
        def seen(junk: jax.Array) -> jax.Array:
            return jnp.matmul(visible.astype(out.dtype), junk.astype(out.dtype), precision=precision) > 0

        nan, up, down = seen(jnp.isnan(x)), seen(x == jnp.inf), seen(x == -jnp.inf)
        infinite = jnp.where(up, jnp.full_like(out, jnp.inf), jnp.full_like(out, -jnp.inf))
        given = jnp.where(up | down, infinite, out)
        return jnp.where(nan | (up & down), jnp.full_like(out, jnp.nan), given)

    return lax.cond(any_junk(lax.stop_gradient(x)), put, lambda out: out, out)
