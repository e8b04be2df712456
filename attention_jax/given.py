"""What a caller may give where a number or an array is wanted, and how to look at it without touching a device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AnyArray = jax.Array | np.ndarray


def is_concrete(value: Any) -> bool:
    """Whether a value can be read without stalling a device: Python's and NumPy's only."""
    return isinstance(value, (int, float, np.ndarray, np.generic))


def kind_of(value: Any) -> str:
    """NumPy's letter for the kind of a number or array ("i", "u", "f", "b", ...), else the name of its type."""
    if hasattr(value, "dtype"):
        return value.dtype.kind
    return {int: "i", float: "f", bool: "b"}.get(type(value), type(value).__name__)


def promoted(*dtypes: Any) -> np.dtype:
    """The dtype that all of these promote to, whatever `jax_numpy_dtype_promotion` says.

    Example:
        >>> promoted(jnp.bfloat16, jnp.float32)
        dtype('float32')
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))
