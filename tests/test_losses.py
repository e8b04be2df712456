"""The next-token loss: right answers where other libraries went wrong, and laws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.losses import cross_entropy, lm_loss

TOLERANCES = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 0.04, "float16": 0.006}
BIG_TOLERANCES = {"float64": 1e-8, "float32": 5e-3}


def exact(seed, *shape):
    """Frozen normal values, multiples of 1/32 below 8: exact in every floating type."""
    return np.clip(np.round(np.random.RandomState(seed).standard_normal(shape) * 32) / 32, -7.96875, 7.96875)


COPYING = np.array([[1, 2, 3, 0, 1]])

# name: (logits, tokens, pad, loss, tolerances); what a wrong implementation gives stands in the comment
CASES = {
    "only_padding": (exact(2301, 2, 3, 4), np.zeros((2, 3), int), 0, 0.0, TOLERANCES),  # NaN, by 0/0
    "copying_its_input": (6.0 * np.eye(4)[COPYING], COPYING, None, 6.00740874388, TOLERANCES),  # 0.0074, by no shift
    # 2.29685, by scoring the end of one row against the start of the next
    "two_rows": (exact(2331, 2, 3, 4), np.array([[1, 2, 3], [0, 3, 2]]), None, 2.05176455728, TOLERANCES),
    # 1.0343, by dividing by all positions
    "some_padding": (exact(2341, 2, 4, 4), np.array([[1, 2, 0, 0], [3, 1, 2, 0]]), 0, 2.06859701596, TOLERANCES),
    # NaN, by an index of -100
    "pad_outside": (exact(2361, 1, 4, 4), np.array([[1, -100, 2, -100]]), -100, 0.396842651622, TOLERANCES),
    # NaN, by 0 · inf
    "forbidden_class": (
        np.where(np.arange(4) == 2, -np.inf, exact(2371, 1, 3, 4)),
        np.array([[0, 1, 3]]),
        None,
        0.739552098627,
        TOLERANCES,
    ),
    # NaN, by the exponential of a large number
    "large_logits": (
        10000.0 + exact(2381, 1, 4, 5) * 8,
        np.array([[1, 4, 2, 3]]),
        None,
        2.61974524618,
        BIG_TOLERANCES,
    ),
}


def gradient_by_hand(logits, tokens, pad):
    """(softmax - one-hot) / number of counted targets at counted positions, 0 elsewhere."""
    out = np.zeros(logits.shape)
    counted = [(b, t) for b, t in np.ndindex(*tokens.shape) if t + 1 < tokens.shape[1] and tokens[b, t + 1] != pad]
    for b, t in counted:
        weights = np.exp(logits[b, t] - logits[b, t].max())
        out[b, t] = weights / weights.sum()
        out[b, t, tokens[b, t + 1]] -= 1
    return out / max(len(counted), 1)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_its_gradient_are_right_where_others_went_wrong(case, dtype):
    logits, tokens, pad, loss, tolerances = CASES[case]
    if dtype not in tolerances:
        pytest.skip("the logits do not survive this dtype")
    tolerance = tolerances[dtype]
    with jax.enable_x64(dtype == "float64"):
        value, gradient = jax.value_and_grad(lm_loss)(jnp.asarray(logits, dtype), jnp.asarray(tokens), pad=pad)
        assert gradient.dtype == dtype
        np.testing.assert_allclose(np.float64(value), loss, rtol=tolerance, atol=tolerance)
        expected = gradient_by_hand(logits, tokens, pad)
        np.testing.assert_allclose(np.float64(gradient), expected, rtol=tolerance, atol=tolerance)
        assert (np.float64(gradient)[expected == 0] == 0).all()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_junk_where_nothing_counts_reaches_neither_loss_nor_gradient(junk):
    logits, tokens, pad, loss, _ = CASES["some_padding"]
    logits = jnp.asarray(logits, jnp.float32).at[0, 1:].set(junk)
    value, gradient = jax.value_and_grad(lm_loss)(logits, jnp.asarray(tokens), pad=pad)
    np.testing.assert_allclose(value, loss, rtol=3e-5)
    assert (np.asarray(gradient[0, 1:]) == 0).all()
    assert np.isfinite(gradient).all()


def test_the_last_position_has_no_target_and_no_gradient():
    logits, tokens = CASES["two_rows"][:2]
    gradient = jax.grad(lm_loss)(jnp.asarray(logits, jnp.float32), jnp.asarray(tokens))
    assert (np.asarray(gradient[:, -1]) == 0).all()
    assert (np.asarray(gradient[:, :-1]) != 0).all()


@pytest.mark.parametrize("length", [0, 1])
def test_a_sequence_without_targets_costs_nothing(length):
    value, gradient = jax.value_and_grad(lm_loss)(jnp.ones((2, length, 4)), jnp.zeros((2, length), jnp.int32))
    assert value == 0
    assert (np.asarray(gradient) == 0).all()


def test_a_label_outside_the_classes_that_counts_gives_nan():
    for label in (-1, 4):
        assert np.isnan(cross_entropy(jnp.zeros((1, 4)), jnp.array([label])))


def test_a_forbidden_label_costs_infinitely_much():
    assert cross_entropy(jnp.array([[0.0, -jnp.inf]]), jnp.array([1])) == np.inf


def test_the_loss_is_float32_at_least_and_its_mean_does_not_depend_on_how_batches_are_laid_out():
    logits, labels = exact(7, 2, 3, 4, 5), np.random.RandomState(1).randint(0, 5, (2, 3, 4))
    whole = cross_entropy(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(labels))
    flat = cross_entropy(jnp.asarray(logits, jnp.bfloat16).reshape(24, 5), jnp.asarray(labels).reshape(24))
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(whole, flat, rtol=1e-6)


def test_labels_of_any_integer_type_are_taken():
    logits, tokens, _, loss, _ = CASES["two_rows"]
    for dtype in (np.uint8, np.int8, np.int32):
        value = lm_loss(np.float32(logits), tokens.astype(dtype))
        np.testing.assert_allclose(value, loss, rtol=3e-5)
