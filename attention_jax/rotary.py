"""Rotary positions: queries and keys turned by angles that grow with their position.

Two features at a time are read as a point in the plane and turned by position · frequency, so that the product of a
query and a key depends on the distance between their positions, not on the positions themselves.
"""

import dataclasses
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .errors import explain
from .given import AnyArray, kind_of, promoted


@final
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Which features are turned together, and how fast.

    Pair n of D / 2 turns by base^(-2n / D) radians per position.

    Attributes:
        base: of the frequencies; larger reaches farther.
        interleaved: True pairs features (0, 1), (2, 3), ...; False, half-split, pairs n with n + D / 2. Weights trained
            with one do not fit the other.
    """

    base: float = 10000.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.base > 0:
            raise ValueError(explain("Rotary", "the base must be positive.", {"base": self.base}))


def rotate(
    x: Float[AnyArray, "... T D"], positions: int | Int[AnyArray, "..."] | None = None, rotary: Rotary = Rotary()
) -> Float[Array, "... T D"]:
    """Turns every row by the angles of its position.

    Args:
        x: queries or keys, `(..., H, T, D)` or `(T, D)`; D is even.
        positions: where the rows stand: the first one's position, `(T,)`, or batch axes + `(T,)`; None: from 0.
        rotary: base and pairing.

    Returns:
        Shape and dtype of x. Angles, sines and products are float32, or float64 where x is: a bfloat16 angle would be
        off by whole turns at position 1000.

    Raises:
        TypeError: positions that are not integers, x that is not an array of floats.
        ValueError: D is odd, or the positions do not fit.

    Example:
        >>> rotate(jnp.ones((2, 2)), 0).tolist()[0]
        [1.0, 1.0]

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """
    if not isinstance(x, (jax.Array, np.ndarray)) or not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        given = f"{x.dtype}{x.shape}" if hasattr(x, "dtype") else type(x).__name__
        raise TypeError(explain("rotate", "x must be an array of floats with axes (..., T, D).", {"x": given}))
    width = x.shape[-1]
    if width % 2:
        raise ValueError(explain("rotate", "rotary positions need an even width D.", {"x (..., T, D)": x.shape}))
    exact = promoted(x.dtype, jnp.float32)
    frequency = rotary.base ** (-2 * np.arange(width // 2) / max(width, 1))  # in float64, then rounded once
    angle = _oriented(positions, x).astype(exact) * jnp.asarray(frequency, exact).reshape((1,) * (x.ndim - 1) + (-1,))
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    wide = jnp.asarray(x).astype(exact)
    a, b = (wide[..., 0::2], wide[..., 1::2]) if rotary.interleaved else jnp.split(wide, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    both = jnp.stack(turned, axis=-1).reshape(x.shape) if rotary.interleaved else jnp.concatenate(turned, axis=-1)
    return both.astype(x.dtype)


def _oriented(positions: Any, x: AnyArray) -> Int[Array, "... T 1"]:
    """Positions with the axes of x, 1 for the heads and the features."""
    if positions is not None and kind_of(positions) not in "iu":
        raise TypeError(explain("rotate", "positions must be an int or integers.", {"positions": kind_of(positions)}))
    rows, shape = x.shape[-2], np.shape(positions) if positions is not None else ()
    fits = len(shape) == x.ndim - 2 and all(n in (1, b) for n, b in zip(shape[:-1], x.shape, strict=False))
    if shape and (shape[-1] != rows or not (len(shape) == 1 or fits)):
        rule = "positions must be one number, one entry per row, or batch axes in front of the rows."
        raise ValueError(explain("rotate", rule, {"positions": shape, "x (..., H, T, D)": x.shape}))
    if not shape:
        first = jnp.asarray(0 if positions is None else positions).astype(jnp.int32)
        return (jnp.arange(rows, dtype=jnp.int32) + first).reshape((1,) * (x.ndim - 2) + (rows, 1))
    lead = (1,) * (x.ndim - 2) if len(shape) == 1 else (*shape[:-1], 1)
    return jnp.asarray(positions).reshape(*lead, rows, 1)
