"""Dropout of attention weights without a stored mask: a function of the key and of where a weight stands.

Whether the weight of (batch index, head, row, column) is kept follows from a hash of these numbers and the random key
alone: one hash per row, then one 32-bit finaliser per weight. So every kernel drops the same weights, whatever its
tiles, in the forward and the backward pass alike, and no (T, S) array is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, UInt32

from .sides import Part, Side

_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 divided by the golden ratio: spreads consecutive counters


def seed_of(key: Any) -> UInt32[Array, " words"]:
    """The words of a random key, typed (`jax.random.key`) or legacy (`jax.random.PRNGKey`)."""
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key


def keep(seed: UInt32[Array, " words"], rate: Any, lead: Part, q: Side, k: Side) -> Bool[Array, "..."]:
    """Which weights of a tile are kept.

    Args:
        seed: words of the random key.
        rate: share of weights that are dropped, 0-d.
        lead: the batch axes and heads that the tile belongs to.
        q, k: the sides of the tile; their rows in the arrays are hashed, not their positions.
    """
    axes = len(lead.sizes)
    state = jnp.zeros((1,) * (axes + 2), jnp.uint32)
    for word in seed:
        state = _mix(state ^ word)
    for axis, (start, size) in enumerate(zip(lead.starts, lead.sizes, strict=True)):
        counter = lax.iota(jnp.uint32, size) + jnp.asarray(start).astype(jnp.uint32)
        counter = counter.reshape((1,) * axis + (size,) + (1,) * (axes + 1 - axis))
        state = _mix(state + _GOLDEN * (counter + np.uint32(1)))
    rows = _mix(state + _GOLDEN * (q.index.astype(jnp.uint32) + np.uint32(1)))
    bits = _mix(rows ^ (_GOLDEN * (k.index.astype(jnp.uint32) + np.uint32(1)))) + rows
    return bits >= _threshold(rate)


def _mix(x: jax.Array) -> jax.Array:
    """A 32-bit finaliser: every input bit changes every output bit (constants of Chris Wellons' hash-prospector)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _threshold(rate: Any) -> jax.Array:
    """rate · 2^32 in 32 bits: the weights whose bits lie below it are dropped."""
    high = jnp.floor(jnp.asarray(rate, jnp.float32) * np.float32(2**16))
    low = (jnp.asarray(rate, jnp.float32) * np.float32(2**16) - high) * np.float32(2**16)
    high, low = high.astype(jnp.uint32), low.astype(jnp.uint32)
    full = np.uint32(0xFFFFFFFF)
    return jnp.where(high >= np.uint32(2**16), full, (high << np.uint32(16)) | low)
