"""Rotary positions against complex numbers in NumPy, and the property they exist for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.rotary import Rotary, rotate

PAIRINGS = [Rotary(), Rotary(interleaved=True), Rotary(base=500.0), Rotary(base=500.0, interleaved=True)]


def turned(x, positions, rotary):
    """Each pair as a complex number, times e^(i · position · frequency); `positions` has the rows last."""
    width = x.shape[-1]
    frequency = rotary.base ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * np.asarray(positions, np.float64)[..., None] * frequency)
    first, second = (x[..., 0::2], x[..., 1::2]) if rotary.interleaved else (x[..., : width // 2], x[..., width // 2 :])
    pairs = (first + 1j * second) * turn
    if not rotary.interleaved:
        return np.concatenate([pairs.real, pairs.imag], -1)
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


@pytest.mark.parametrize("rotary", PAIRINGS, ids=str)
def test_rotate_multiplies_pairs_by_a_complex_turn(rotary):
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 8)).astype(np.float32)
    per_row, per_example = np.array([4, -2, 0, 100, 7], np.int32), np.array([[1, 2, 3, 4, 5], [9, 0, 0, 1, 2]])
    cases = [(None, np.arange(5)), (3, np.arange(3, 8)), (per_row, per_row), (per_example, per_example[:, None])]
    for given, meant in cases:
        np.testing.assert_allclose(rotate(x, given, rotary), turned(x, meant, rotary), atol=2e-5)


@pytest.mark.parametrize("rotary", PAIRINGS, ids=str)
def test_products_depend_on_the_distance_alone(rotary):
    q, k = np.random.default_rng(1).normal(size=(2, 1, 4, 16)).astype(np.float32)

    def products(first):
        return rotate(q, first, rotary) @ rotate(k, first, rotary).swapaxes(-1, -2)

    np.testing.assert_allclose(products(50), products(0), atol=1e-4)
    assert not np.allclose(products(0), q @ k.swapaxes(-1, -2), atol=1e-2)


def test_low_precision_is_turned_in_float32():
    x = jnp.ones((1, 4), jnp.bfloat16)
    got = rotate(x, 1001)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), turned(np.ones((1, 4)), [1001], Rotary()), atol=1e-2)


def test_positions_may_be_traced_and_x_may_be_one_head():
    x = np.random.default_rng(2).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(rotate)(x, jnp.asarray(2)), turned(x, [2, 3, 4], Rotary()), atol=1e-5)
    assert rotate(x[:0]).shape == (0, 6)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: rotate(jnp.ones((2, 3))), ValueError, "even width D"),
        (lambda: rotate(jnp.ones((2, 4)), jnp.arange(3)), ValueError, "one entry per row"),
        (lambda: rotate(jnp.ones((2, 4)), 1.5), TypeError, "positions must be an int"),
        (lambda: Rotary(base=0), ValueError, "base must be positive"),
    ],
)
def test_what_cannot_be_turned_is_refused(make, error, text, plain_errors):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("x", [np.full((2, 4), 7), [[1.0, 2.0]], np.ones(4)], ids=["integers", "list", "one axis"])
def test_only_arrays_of_floats_with_two_axes_are_turned(x, plain_errors):
    with pytest.raises(TypeError, match="array of floats"):
        rotate(x)


def test_positions_of_another_batch_are_refused(plain_errors):
    for shape in ((1, 2, 3, 4), (2, 2, 3, 4)):
        with pytest.raises(ValueError, match="batch axes"):
            rotate(jnp.ones(shape), np.zeros((3, 3), int))
