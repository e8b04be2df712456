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
    """Whether any entry is NaN or inf, or all together are larger than any number.

    A sum tells, and quicker than a look at each entry. Under `vmap` the question is asked of all examples at once, so
    that a branch on the answer stays a branch.
    """
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)  # sums of float16 would reach inf
    return ~jnp.isfinite(wide.sum())


@any_junk.def_vmap
def _any_junk_mapped(axis_size: int, in_batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return any_junk(x), False


def marks(x: Float[Array, "... d"]) -> Float[Array, "... 3*d"]:
    """Where `x` is NaN, inf and -inf, as three blocks of 0 and 1: a product with them counts who sees what."""
    return jnp.concatenate([mark(x, kind) for kind in range(KINDS)], axis=-1)


KINDS = 3


def mark(x: Float[Array, "... d"], kind: Any) -> Float[Array, "... d"]:
    """1 where `x` is NaN (kind 0), inf (1) or -inf (2), else 0."""
    infinite = x == jnp.where(jnp.equal(kind, 1), jnp.inf, -jnp.inf).astype(x.dtype)
    return jnp.where(jnp.equal(kind, 0), jnp.isnan(x), infinite).astype(x.dtype)


def given_back(
    out: Float[Array, "... d"], nan: Bool[Array, "... d"], up: Bool[Array, "... d"], down: Bool[Array, "... d"]
) -> Float[Array, "... d"]:
    """`out`, a product with a cleared array, with what the junk would have made of it.

    Args:
        out: a product over rows of a cleared array.
        nan, up, down: where a term of the sum is NaN, inf or -inf.
    """
    infinite = jnp.where(up, jnp.full_like(out, jnp.inf), jnp.full_like(out, -jnp.inf))
    given = jnp.where(up | down, infinite, out)
    return jnp.where(nan | (up & down), jnp.full_like(out, jnp.nan), given)


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
        seen = jnp.matmul(visible.astype(out.dtype), marks(x).astype(out.dtype), precision=precision)
        return given_back(out, *jnp.split(seen > 0, KINDS, axis=-1))

    return lax.cond(any_junk(lax.stop_gradient(x)), put, lambda out: out, out)
