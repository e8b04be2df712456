"""The keywords that Flax's layers pass to `attention_fn`: dropout, sown weights, dtypes, precision; none is ignored."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import equations

from attention_jax.drop_in import attention_fn

B, T, H, W = 2, 5, 4, 8
X = jax.random.normal(jax.random.key(0), (B, T, W))
PADDING = jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
FLAX_MASK = nn.combine_masks(nn.make_causal_mask(PADDING), nn.make_attention_mask(jnp.ones((B, T), bool), PADDING))


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


def _dropped(broadcast, heads=H, kv_heads=H, **options):
    """Which weights were dropped: the values are a unit vector per key, so the output is the weights."""
    q, k, _ = _qkv((B, T, heads, 4), (B, T, kv_heads, 4))
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None, :], (B, T, kv_heads, T))
    out = attention_fn(q, k, v, broadcast_dropout=broadcast, dropout_rng=jax.random.key(3), dropout_rate=0.5, **options)
    return out, np.asarray(out.swapaxes(1, 2)) == 0


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_broadcast_dropout_drops_the_same_pairs_for_every_example_and_head(kv_heads, masked):
    options = {"bias": jnp.ones((B, H, T, T)), "mask": jnp.ones((B, 1, 1, T)), "is_causal": True} if masked else {}
    out, pattern = _dropped(True, kv_heads=kv_heads, **options)
    q, k, _ = _qkv((B, T, H, 4), (B, T, kv_heads, 4))
    v = jnp.broadcast_to(jnp.eye(T)[None, :, None, :], (B, T, kv_heads, T))
    np.testing.assert_array_equal(pattern, np.broadcast_to(pattern[:1, :1], pattern.shape))
    assert 0 < pattern.mean() < 1
    kept = np.asarray(attention_fn(q, k, v, **options)) * ~pattern.swapaxes(1, 2) * 2
    _close(out, kept)


def test_without_broadcast_each_example_and_head_drops_its_own_pairs():
    _, pattern = _dropped(False)
    assert len({pattern[b, h].tobytes() for b in range(B) for h in range(H)}) == B * H


def test_dropout_takes_typed_and_legacy_keys_alike():
    q, k, v = _qkv()
    typed, legacy = jax.random.key(3), jax.random.PRNGKey(3)
    for broadcast in (True, False):
        options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
        _close(
            attention_fn(q, k, v, dropout_rng=typed, **options), attention_fn(q, k, v, dropout_rng=legacy, **options)
        )


def test_deterministic_means_no_dropout():
    q, k, v = _qkv()
    _close(attention_fn(q, k, v, dropout_rate=0.5, deterministic=True), attention_fn(q, k, v))


def test_dropout_without_a_key_is_refused():
    with pytest.raises(ValueError, match="random key"):
        attention_fn(*_qkv(), dropout_rate=0.5)


@pytest.mark.parametrize("broadcast", [True, False])
def test_both_layers_train_with_dropout(broadcast):
    options = {"dropout_rate": 0.5, "broadcast_dropout": broadcast}
    layer = _nnx(attention_fn, **options)
    one, two = layer(X, deterministic=False), layer(X, deterministic=False)
    assert not np.allclose(one, two)
    linen = nn.MultiHeadDotProductAttention(H, attention_fn=attention_fn, deterministic=False, **options)
    variables = linen.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)
    loss = lambda v, key: (linen.apply(v, X, rngs={"dropout": key}) ** 2).sum()  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(variables, jax.random.key(2))
    assert value != loss(variables, jax.random.key(3))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_both_layers_get_their_weights_sown():
    layer = _nnx(attention_fn)
    _, kept = nnx.capture(layer, nnx.Intermediate)(X, mask=FLAX_MASK, sow_weights=True)
    (sown,) = kept["attention_weights"].get_value()
    assert sown.shape == (B, H, T, T)
    _close(sown.sum(-1), np.ones((B, H, T)))
    linen = nn.MultiHeadDotProductAttention(H, attention_fn=attention_fn)
    variables = linen.init(jax.random.key(0), X)
    _, kept = linen.apply(variables, X, mask=FLAX_MASK, sow_weights=True, mutable=["intermediates"])
    theirs = nn.MultiHeadDotProductAttention(H)
    _, expected = _standard(theirs.apply, variables, X, mask=FLAX_MASK, sow_weights=True, mutable=["intermediates"])
    _close(kept["intermediates"]["attention_weights"][0], expected["intermediates"]["attention_weights"][0])


def test_sown_weights_are_those_before_dropout():
    layer = _nnx(attention_fn, dropout_rate=0.5, deterministic=False)
    _, kept = nnx.capture(layer, nnx.Intermediate)(X, sow_weights=True)
    (sown,) = kept["attention_weights"].get_value()
    _close(sown.sum(-1), np.ones((B, H, T)))


def test_what_is_no_flax_module_cannot_be_sown_into():
    with pytest.raises(ValueError, match="Flax module"):
        attention_fn(*_qkv(), module=object())


def test_dtype_is_that_of_the_computation_and_the_result():
    q, k, v = _qkv()
    out = attention_fn(q, k, v, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    cast = attention_fn(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    np.testing.assert_array_equal(np.float32(out), np.float32(cast))
    assert attention_fn(q.astype(jnp.bfloat16), k, v).dtype == jnp.float32


def test_promote_dtype_replaces_the_promotion():
    seen = []

    def promote(arrays, dtype=None):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    assert attention_fn(*_qkv(), dtype=jnp.float32, promote_dtype=promote).dtype == jnp.float16
    assert seen == [jnp.float32]


def _precisions(function, *args):
    """The precision of every product in the traced function, those inside rules and loops included."""
    traced = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return {equation.params["precision"] for equation in traced if equation.primitive.name == "dot_general"}


HIGH, DEFAULT = jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT


@pytest.mark.parametrize("precision", [HIGH, "high", (HIGH, HIGH)], ids=["enum", "name", "pair"])
def test_precision_is_that_of_every_product_forward_and_backward(precision):
    q, k, v = _qkv()
    forward = lambda q, k, v: attention_fn(q, k, v, precision=precision)  # noqa: E731
    assert _precisions(forward, q, k, v) == {(HIGH, HIGH)}
    gradient = jax.grad(lambda *qkv: forward(*qkv).sum(), argnums=(0, 1, 2))
    assert _precisions(gradient, q, k, v) == {(HIGH, HIGH)}


def test_two_different_precisions_are_refused():
    with pytest.raises(ValueError, match="same precision"):
        attention_fn(*_qkv(), precision=(HIGH, DEFAULT))


@pytest.mark.parametrize("name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_a_foreign_einsum_is_refused(name):
    with pytest.raises(ValueError, match=name):
        attention_fn(*_qkv(), **{name: jnp.einsum})


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="windowed"):
        attention_fn(*_qkv(), windowed=True)
