"""`attention_fn` inside Flax's own layers, NNX and linen, against Flax's own function; and alone where they differ."""

import inspect

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

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
    return set(_products(jax.make_jaxpr(function)(*args).jaxpr))


def _products(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)


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


def test_attention_works_inside_an_equinox_module():
    class Mixer(eqx.Module):
        q: eqx.nn.Linear
        kv: eqx.nn.Linear

        def __call__(self, x):
            return attention(jax.vmap(self.q)(x), jax.vmap(self.kv)(x), jax.vmap(self.kv)(x), Causal())

    keys = jax.random.split(jax.random.key(0))
    mixer = Mixer(eqx.nn.Linear(W, W, key=keys[0]), eqx.nn.Linear(W, W, key=keys[1]))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda mixer, x: jax.vmap(mixer)(x).sum()))(mixer, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(gradient.kv.weight).max() > 0


def test_attention_works_inside_a_haiku_transform():
    def forward(x):
        q, k, v = (hk.Linear(W, name=name)(x)[:, None] for name in "qkv")
        return attention(q, k, v, Causal())[:, 0]

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X)
    gradient = jax.jit(jax.grad(lambda params, x: model.apply(params, x).sum()))(params, X)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert np.abs(gradient["v"]["w"]).max() > 0
