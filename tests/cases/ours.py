"""The cases in our layout, (batch, heads, length, width), and what their tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.kernels import KERNELS

from . import load

CASES = load("attention")
kernels = pytest.mark.parametrize("kernel", KERNELS)
weighing_kernels = pytest.mark.parametrize("kernel", ["dense"])  # those that can give weights


def inputs(name, dtype="float32"):
    """The inputs of a case in our layout, those of four axes turned; masks and ids as they are."""
    arrays = {}
    for key, x in CASES[name].inputs.items():
        turn = x.ndim == 4 and key in ("q", "k", "v", "do", "v_id", "q2", "tq", "tk", "tv")
        arrays[key] = jnp.asarray((x.swapaxes(1, 2) if turn else x).astype(dtype)) if x.dtype.kind == "f" else x
    return arrays


def operands(name, dtype="float32"):
    arrays = inputs(name, dtype)
    return tuple(arrays[key] for key in "qkv")


def expected(name, key):
    """A literal of a case, in our layout."""
    x = CASES[name].expected[key]
    return x.swapaxes(1, 2) if x.ndim == 4 and key not in ("weights", "dbias") else x


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b, tolerance=3e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


def gradients(call, q, k, v, cotangent):
    """Gradients of q, k and v."""
    return jax.vjp(call, q, k, v)[1](cotangent)
