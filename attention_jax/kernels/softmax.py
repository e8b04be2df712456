"""The softmax over visible pairs; of keys met tile after tile, what is known so far is a `RunningSoftmax`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .products import columns


class RunningSoftmax(NamedTuple):
    """Softmax over the keys met so far, times their values.

    Attributes:
        out: Σ exp(logits - largest) v, `(..., H, t, V)`.
        largest: the largest logit, `(..., H, t, 1)`; -inf while no key has been allowed.
        total: Σ exp(logits - largest), `(..., H, t, 1)`.
    """

    out: Array
    largest: Array
    total: Array

    @classmethod
    def start(cls, q: Float[Array, "... H t D"], width: int) -> "RunningSoftmax":
        """No key met yet; made from `q`, since a loop's carry must vary over the same devices all along."""
        one = jnp.zeros_like(q[..., :1])
        return cls(jnp.broadcast_to(one, (*one.shape[:-1], width)), jnp.full_like(one, -jnp.inf), one)

    def add(
        self, logits: Float[Array, "... H t s"], v: Float[Array, "... K s V"], kept: Any, precision: Any
    ) -> "RunningSoftmax":
        """With more keys, whose logits are -inf where they are hidden; `kept`: see `only`."""
        largest = jnp.maximum(self.largest, logits.max(-1, keepdims=True))
        level = finite(largest)
        shrink, weights = jnp.exp(self.largest - level), jnp.exp(logits - level)
        total = self.total * shrink + weights.sum(-1, keepdims=True)
        return RunningSoftmax(self.out * shrink + columns(only(kept, weights), v, precision), largest, total)

    def result(self) -> tuple[Float[Array, "... H t V"], Float[Array, "... H t 1"]]:
        """(out, log-sum-exp); 0 and -inf for rows that saw nothing."""
        nothing = self.largest == -jnp.inf
        total = jnp.where(nothing, jnp.ones_like(self.total), self.total)
        return self.out / total, jnp.where(nothing, self.largest, self.largest + jnp.log(total))


def finite(level: Float[Array, "..."]) -> Float[Array, "..."]:
    """0 for -inf, the level of a row that sees nothing: -inf - -inf is NaN."""
    return jnp.where(level == -jnp.inf, jnp.zeros_like(level), level)


def hide(visible: Bool[Array, "..."] | None, logits: Float[Array, "..."]) -> Float[Array, "..."]:
    """-inf at pairs that are not visible; None: all are."""
    return logits if visible is None else jnp.where(visible, logits, jnp.full_like(logits, -jnp.inf))


def only(visible: Bool[Array, "..."] | None, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """0 at pairs that are not visible; None: all are."""
    return x if visible is None else jnp.where(visible, x, jnp.zeros_like(x))
