"""The layers are the pure functions with parameters of their own, and nothing more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import drop_in, layers, recurrent
from attention_jax.layers import Block, MultiHeadAttention, Recurrence
from attention_jax.masks import Causal, Lengths, Window
from attention_jax.multihead import mha
from attention_jax.rotary import Rotary

W, T, S = 8, 5, 7
X = jax.random.normal(jax.random.key(0), (2, T, W))
CONTEXT = jax.random.normal(jax.random.key(1), (2, S, 6))


def params_of(layer):
    return {name: param[...] for name, param in layer.params.items()}


def equal(one, two):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def test_the_drop_in_is_at_home_among_the_layers():
    assert layers.attention_fn is drop_in.attention_fn


def test_self_attention_is_mha_of_its_parameters():
    layer = MultiHeadAttention(W, 4, kv_heads=2, bias=True, rotary=Rotary(), rngs=nnx.Rngs(0))
    equal(layer(X), mha(params_of(layer), X, rotary=Rotary()))
    assert set(layer.params) == {"q", "k", "v", "out", "q_bias", "k_bias", "v_bias", "out_bias"}


def test_cross_attention_has_widths_of_its_own():
    widths = {"key_width": 3, "value_width": 5, "context_width": 6, "out_width": 10}
    layer = MultiHeadAttention(W, 4, kv_heads=2, **widths, rngs=nnx.Rngs(0))
    equal(layer(X, CONTEXT), mha(params_of(layer), X, CONTEXT))
    assert layer(X, CONTEXT).shape == (2, T, 10)
    shapes = {name: param.shape for name, param in params_of(layer).items()}
    assert shapes == {"q": (W, 4, 3), "k": (6, 2, 3), "v": (6, 2, 5), "out": (4, 5, 10)}


def test_the_mask_of_a_call_narrows_that_of_the_layer():
    layer = MultiHeadAttention(W, 2, mask=Causal(), rngs=nnx.Rngs(0))
    lengths = jnp.array([5, 3])
    equal(layer(X), mha(params_of(layer), X, mask=Causal()))
    equal(layer(X, mask=Lengths(lengths)), mha(params_of(layer), X, mask=Causal() & Lengths(lengths)))
    pairs = np.tril(np.ones((T, T), bool), 1)
    equal(layer(X, mask=jnp.asarray(pairs)), mha(params_of(layer), X, mask=Causal()))


def test_positions_are_handed_on():
    layer = MultiHeadAttention(W, 2, context_width=6, mask=Window(2, 0), rotary=Rotary(), rngs=nnx.Rngs(0))
    where = {"q_positions": jnp.array([3, 1, 4, 1, 5]), "kv_positions": 1}
    expected = mha(params_of(layer), X, CONTEXT, Window(2, 0), rotary=Rotary(), **where)
    equal(layer(X, CONTEXT, **where), expected)
    assert not np.allclose(expected, layer(X, CONTEXT, q_positions=0))


def test_dropout_is_drawn_anew_in_training_and_absent_in_evaluation():
    layer = MultiHeadAttention(W, 2, dropout=0.5, rngs=nnx.Rngs(0))
    assert not np.allclose(layer(X), layer(X))
    layer.eval()
    equal(layer(X), mha(params_of(layer), X))
    layer.train()
    assert not np.allclose(layer(X), mha(params_of(layer), X))


def test_the_same_streams_drop_the_same_weights():
    one, two = (MultiHeadAttention(W, 2, dropout=0.5, rngs=nnx.Rngs(3)) for _ in range(2))
    equal(one(X), two(X))


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_dropout_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="probability"):
        MultiHeadAttention(W, 2, dropout=rate, rngs=nnx.Rngs(0))


def test_every_parameter_of_the_attention_layer_learns():
    layer = MultiHeadAttention(W, 2, bias=True, mask=Causal(), rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer)
    sizes = {name: float(jnp.abs(leaf[...]).max()) for name, leaf in gradient.params.items()}
    assert all(size > 1e-4 for name, size in sizes.items() if name != "k_bias"), sizes
    assert sizes["k_bias"] < 1e-4  # it moves all logits of a row alike


@pytest.mark.parametrize("cell", recurrent.CELLS)
def test_a_recurrence_is_an_unrolled_cell_and_a_projection(cell):
    layer = Recurrence(W, 11, cell, rngs=nnx.Rngs(0))
    _, states = recurrent.unroll(recurrent.CELLS[cell], params_of(layer), X)
    assert states.shape == (2, T, 11)
    equal(layer(X), layer.out(states))
    assert layer(X).shape == X.shape
    gradient = nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer)
    assert all((np.asarray(leaf) != 0).any() for leaf in jax.tree.leaves(gradient))


def test_an_unknown_cell_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ValueError, match=r"(?s)unknown cell.*gru.*linear"):
        Recurrence(W, 3, "transformer", rngs=nnx.Rngs(0))


class Reversed(nnx.Module):
    """A mixer that a test can follow by hand."""

    def __call__(self, x):
        return x[..., ::-1, :]


def normed(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def test_a_block_is_pre_norm():
    block = Block(Reversed(), W, 12, rngs=nnx.Rngs(0))
    block.before_mixer.scale[...] = jnp.linspace(0.5, 2, W)
    x = np.asarray(X)
    mixed = x + normed(x, np.linspace(0.5, 2, W))[:, ::-1]
    hidden = normed(mixed, np.ones(W)) @ np.asarray(block.widen.kernel[...])
    expected = mixed + np.asarray(jax.nn.gelu(hidden)) @ np.asarray(block.narrow.kernel[...])
    np.testing.assert_allclose(block(X), expected, rtol=1e-5, atol=1e-5)


def test_tokens_of_a_block_meet_in_its_mixer_only():
    block = Block(nnx.Linear(W, W, rngs=nnx.Rngs(0)), W, 12, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(block(X)[:, ::-1], block(X[:, ::-1]), rtol=1e-6, atol=1e-6)


def test_a_block_drops_in_training_only():
    block = Block(Reversed(), W, 12, dropout=0.5, rngs=nnx.Rngs(0))
    assert not np.allclose(block(X), block(X))
    block.eval()
    equal(block(X), block(X))
