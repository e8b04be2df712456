"""`attention_fn` inside Flax's own layers, NNX and linen, against Flax's own function; and alone where they differ."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.dispatch import attention
from attention_jax.drop_in import attention_fn
from attention_jax.masks import Causal

B, T, H, W = 2, 5, 4, 8
X = jax.random.normal(jax.random.key(0), (B, T, W))
PADDING = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
FLAX_MASK = nn.combine_masks(nn.make_causal_mask(PADDING), nn.make_attention_mask(jnp.ones((B, T), bool), PADDING))
TAKES_POSITIONS = "input_positions" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters


def _qkv(shape=(B, T, H, 4), kv_shape=None):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (shape, kv_shape or shape, kv_shape or shape)
    return [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]


def _nnx(function, **options):
    options = {"decode": False, **options}
    return nnx.MultiHeadAttention(H, W, attention_fn=function, rngs=nnx.Rngs(0), **options)


def _standard(function, *args, **options):
    """Flax itself promotes dtypes in places where strict promotion raises."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*args, **options)


def _close(ours, theirs, tolerance=2e-6):
    np.testing.assert_allclose(np.float32(ours), np.float32(theirs), rtol=tolerance, atol=tolerance)


def _reference(q, k, v, **options):
    return _standard(nn.dot_product_attention, q, k, v, **options)


@pytest.mark.parametrize("layer", [nnx.MultiHeadAttention, nn.MultiHeadDotProductAttention])
def test_every_keyword_a_layer_passes_is_named(layer):
    source = inspect.getsource(layer.__call__)
    named = set(inspect.signature(attention_fn).parameters)
    calls = source[source.index("# apply attention") :]
    known = {
        *inspect.signature(nn.dot_product_attention).parameters,
        *inspect.signature(nnx.dot_product_attention).parameters,
    }
    passed = {name for name in known | {"input_positions"} if f"{name}=" in calls or f'"{name}"' in calls}
    assert passed <= named
    assert {"mask", "dropout_rng", "precision"} <= passed
    assert known <= named


@pytest.mark.parametrize("mask", [None, FLAX_MASK, FLAX_MASK.astype(bool)], ids=["none", "floats", "booleans"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_nnx_layer_gives_what_it_gives_with_flax_own_function(mask, is_causal):
    ours, theirs = _nnx(attention_fn), _nnx(nnx.dot_product_attention)
    _close(ours(X, mask=mask, is_causal=is_causal), _standard(theirs, X, mask=mask, is_causal=is_causal))


@pytest.mark.parametrize("mask", [None, FLAX_MASK, FLAX_MASK.astype(bool)], ids=["none", "floats", "booleans"])
def test_the_linen_layer_gives_what_it_gives_with_flax_own_function(mask):
    ours = nn.MultiHeadDotProductAttention(H, attention_fn=attention_fn)
    theirs = nn.MultiHeadDotProductAttention(H)
    variables = theirs.init(jax.random.key(0), X)
    _close(ours.apply(variables, X, mask=mask), _standard(theirs.apply, variables, X, mask=mask))


@pytest.mark.skipif("num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention).parameters, reason="older flax")
def test_the_nnx_layer_may_group_its_heads():
    ours, theirs = _nnx(attention_fn, num_kv_heads=2), _nnx(nnx.dot_product_attention, num_kv_heads=2)
    _close(ours(X, mask=FLAX_MASK), _standard(theirs, X, mask=FLAX_MASK))


def test_the_nnx_layer_trains_as_with_flax_own_function():
    def gradient(layer):
        return jax.tree.leaves(nnx.grad(lambda layer: (layer(X, mask=FLAX_MASK) ** 2).sum())(layer))

    for ours, theirs in zip(
        gradient(_nnx(attention_fn)), _standard(gradient, _nnx(nnx.dot_product_attention)), strict=True
    ):
        _close(ours, theirs, 1e-5)


def test_the_linen_layer_trains_as_with_flax_own_function():
    layers = [nn.MultiHeadDotProductAttention(H, attention_fn=f) for f in (attention_fn, nn.dot_product_attention)]
    variables = layers[1].init(jax.random.key(0), X)
    ours, theirs = (
        _standard(jax.grad(lambda v, layer=layer: (layer.apply(v, X, mask=FLAX_MASK) ** 2).sum()), variables)
        for layer in layers
    )
    jax.tree.map(lambda a, b: _close(a, b, 1e-5), ours, theirs)


@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_with_the_nnx_cache_gives_the_rows_of_the_causal_layer(is_causal):
    layer = _nnx(attention_fn)
    whole = layer(X, is_causal=True)
    layer.init_cache(X.shape)
    steps = [layer(X[:, t : t + 1], decode=True, is_causal=is_causal) for t in range(T)]
    _close(jnp.concatenate(steps, axis=1), whole)


def test_decoding_with_the_linen_cache_gives_the_rows_of_the_causal_layer():
    layer = nn.MultiHeadDotProductAttention(H, attention_fn=attention_fn)
    cached = nn.MultiHeadDotProductAttention(H, attention_fn=attention_fn, decode=True)
    variables = cached.init(jax.random.key(0), X)
    whole = layer.apply({"params": variables["params"]}, X, mask=nn.make_causal_mask(X[..., 0]))
    steps = []
    for t in range(T):
        out, changed = cached.apply(variables, X[:, t : t + 1], mutable=["cache"])
        variables = {**variables, **changed}
        steps.append(out)
    _close(jnp.concatenate(steps, axis=1), whole)


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v = _qkv()
    mask = np.ones((B, 1, T, T), bool)
    mask[1, 0, 2] = False
    out = attention_fn(q, k, v, mask=mask)
    assert (np.asarray(out[1, 2]) == 0).all()
    assert (np.asarray(out[0, 2]) != 0).all()


def test_bias_and_mask_broadcast_as_numpy_does():
    q, k, v = _qkv()
    bias = jax.random.normal(jax.random.key(5), (H, T, T))
    mask = jnp.array([1.0, 0, 2, 1, 1])
    ours = attention_fn(q, k, v, bias=bias, mask=mask)
    _close(ours, _reference(q, k, v, bias=bias, mask=mask != 0))


def test_arrays_without_a_batch_are_taken_as_flax_takes_them():
    q, k, v = _qkv((T, H, 4))
    _close(attention_fn(q, k, v), _reference(q, k, v))


def test_is_causal_with_one_query_and_several_keys_adds_nothing_to_the_mask():
    q, k, v = _qkv((B, 1, H, 4), (B, T, H, 4))
    mask = jnp.arange(T) <= 2
    _close(attention_fn(q, k, v, mask=mask, is_causal=True), attention_fn(q, k, v, mask=mask))


def test_is_causal_with_other_lengths_raises_as_causal_does():
    q, k, v = _qkv((B, 3, H, 4), (B, T, H, 4))
    with pytest.raises(ValueError, match="q_positions") as theirs:
        attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), Causal())
    with pytest.raises(ValueError, match="q_positions") as ours:
        attention_fn(q, k, v, is_causal=True)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("positions", [[4, 3, 2, 1, 0], [[4, 3, 2, 1, 0], [0, 2, 4, 1, 3]]], ids=["T", "B T"])
def test_input_positions_decide_what_is_causal(positions):
    q, k, v = _qkv()
    positions = jnp.array(positions)
    order = jnp.argsort(jnp.broadcast_to(positions, (B, T)), axis=-1)
    sort = lambda x: jnp.take_along_axis(x, order[..., None, None], axis=1)  # noqa: E731
    ours = attention_fn(q, k, v, is_causal=True, input_positions=positions)
    _close(sort(ours), attention_fn(sort(q), sort(k), sort(v), is_causal=True))


def test_input_positions_place_queries_before_keys_that_count_from_zero():
    q, k, v = _qkv()
    ours = attention_fn(q[:, 2:4], k, v, is_causal=True, input_positions=jnp.array([2, 3]))
    _close(ours, attention_fn(q, k, v, is_causal=True)[:, 2:4])


@pytest.mark.skipif(not TAKES_POSITIONS, reason="this flax has no input_positions")
def test_the_nnx_layer_hands_its_input_positions_on():
    layer = _nnx(attention_fn)
    positions = jnp.arange(T)[::-1]
    ours = layer(X, is_causal=True, input_positions=positions)
    _close(ours[:, ::-1], layer(X[:, ::-1], is_causal=True))


def test_input_positions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="positions"):
        attention_fn(*_qkv(), input_positions=jnp.arange(T + 1))
