"""What a prediction costs: cross entropy over the labels that count, and the next-token loss made of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .given import AnyArray, promoted


def cross_entropy(
    logits: Float[AnyArray, "*B T C"], labels: Int[AnyArray, "*B T"], ignore: int | None = None
) -> Float[Array, ""]:
    """mean of -log softmax(logits)[label] over the labels that count, in nats.

    Args:
        logits: over C classes. -inf forbids a class; forbidding the label itself gives inf.
        labels: 0 to C - 1. A label outside that counts makes the loss NaN rather than some wrong number.
        ignore: labels equal to this do not count, whatever the logits there (it may lie outside the classes).

    Returns:
        float32 (float64 for float64 logits); 0, with gradient 0, if nothing counts.

    Example:
        >>> cross_entropy(jnp.zeros((3, 4)), jnp.array([1, 2, -100]), ignore=-100).round(4)  # log 4
        Array(1.3863, dtype=float32)
    """
    logits = jnp.asarray(logits).astype(promoted(logits.dtype, jnp.float32))
    labels = jnp.asarray(labels).astype(jnp.int32)
    if ignore is None:
        counted = jnp.ones_like(labels, bool)
    else:
        counted = labels != ignore
        logits = jnp.where(counted[..., None], logits, 0)
        labels = jnp.where(counted, labels, 0)
    labels = jnp.where(labels < 0, logits.shape[-1], labels)  # a negative index would wrap; one past the end is NaN
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill")[..., 0]
    losses = jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
    return losses.sum() / jnp.maximum(counted.sum(dtype=jnp.int32), 1).astype(losses.dtype)


def lm_loss(
    logits: Float[AnyArray, "*B T C"], tokens: Int[AnyArray, "*B T"], *, pad: int | None = None
) -> Float[Array, ""]:
    """Next-token loss in nats: the logits at position t are scored on token t + 1, each row by itself.

    Args:
        logits: what the model said at each position; the last position has no target and no gradient.
        tokens: what the model read.
        pad: the token that is never a target (0, -100, …); by default every token counts.

    Returns:
        The mean over the targets that count, as `cross_entropy` has it; 0 for a batch of only `pad`, or with T < 2.

    Example:
        >>> lm_loss(jnp.zeros((1, 3, 4)), jnp.array([[1, 2, 3]])).round(4)  # two targets, log 4 each
        Array(1.3863, dtype=float32)
    """
    return cross_entropy(logits[..., :-1, :], tokens[..., 1:], ignore=pad)
