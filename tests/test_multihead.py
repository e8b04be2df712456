"""`mha` against a loop over heads in NumPy: projections, grouping, widths, biases, rotary positions, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from test_rotary import turned

from attention_jax import Causal, Lengths, Rotary, init_mha, mha


def by_hand(params, x, context, allowed, rotary=None, q_at=None, k_at=None):
    """One head of one example at a time, in float64."""
    params, x, context = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, x, context))
    heads, groups = params["q"].shape[1], params["k"].shape[1]
    out = np.zeros((*x.shape[:-1], params["out"].shape[-1]))
    for example in np.ndindex(x.shape[:-2]):
        for h in range(heads):
            g = h // (heads // groups)
            q = x[example] @ params["q"][:, h] + params.get("q_bias", np.zeros((heads, 1)))[h]
            k = context[example] @ params["k"][:, g] + params.get("k_bias", np.zeros((groups, 1)))[g]
            v = context[example] @ params["v"][:, g] + params.get("v_bias", np.zeros((groups, 1)))[g]
            if rotary is not None:
                q, k = turned(q, q_at, rotary), turned(k, k_at, rotary)
            logits = np.where(allowed, q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            out[example] += weights / weights.sum(-1, keepdims=True) @ v @ params["out"][h]
    return out + params.get("out_bias", 0)


def drawn(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


WIDTHS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "own_widths": {"kv_heads": 1, "key_width": 6, "value_width": 5, "out_width": 7, "bias": True},
}


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("rotary", [None, Rotary(), Rotary(interleaved=True)], ids=["plain", "half", "interleaved"])
def test_self_attention_equals_a_loop_over_heads(widths, rotary):
    params = init_mha(jax.random.key(0), width=16, heads=4, **widths)
    params = {name: param + drawn(param.shape, 3) / 10 for name, param in params.items()}
    x = drawn((2, 5, 16))
    want = by_hand(params, x, x, np.tri(5, dtype=bool), rotary, np.arange(5), np.arange(5))
    np.testing.assert_allclose(mha(params, x, mask=Causal(), rotary=rotary), want, atol=2e-5)


def test_cross_attention_reads_keys_and_values_from_the_context():
    params = init_mha(jax.random.key(1), width=16, heads=2, context_width=6, bias=True)
    x, context = drawn((3, 4, 16)), drawn((3, 7, 6), 1)
    want = by_hand(params, x, context, np.ones((4, 7), bool))
    np.testing.assert_allclose(mha(params, x, context), want, atol=2e-5)
    rotary = {"rotary": Rotary(), "q_positions": 3, "kv_positions": jnp.arange(7) * 2}
    want = by_hand(params, x, context, np.ones((4, 7), bool), Rotary(), np.arange(3, 7), np.arange(7) * 2)
    np.testing.assert_allclose(mha(params, x, context, **rotary), want, atol=2e-5)


def test_parameters_have_the_shapes_of_the_table():
    widths = {"kv_heads": 2, "key_width": 3, "value_width": 5, "context_width": 7, "out_width": 11}
    params = init_mha(jax.random.key(0), 13, 4, **widths, bias=True, dtype=jnp.bfloat16)
    shapes = {"q": (13, 4, 3), "k": (7, 2, 3), "v": (7, 2, 5), "out": (4, 5, 11)}
    shapes |= {"q_bias": (4, 3), "k_bias": (2, 3), "v_bias": (2, 5), "out_bias": (11,)}
    assert {name: param.shape for name, param in params.items()} == shapes
    assert {param.dtype for param in params.values()} == {jnp.dtype(jnp.bfloat16)}


def test_a_projection_keeps_the_variance():
    params = init_mha(jax.random.key(0), width=256, heads=4, context_width=64)
    for name, fan_in in {"q": 256, "k": 64, "v": 64, "out": 256}.items():
        assert abs(params[name].std() * fan_in**0.5 - 1) < 0.02, name


def test_no_batch_axis_and_several_are_batches_too():
    params = init_mha(jax.random.key(0), width=8, heads=2)
    x = drawn((2, 3, 5, 8))
    whole = mha(params, x, mask=Causal())
    np.testing.assert_allclose(mha(params, x[1, 2], mask=Causal()), whole[1, 2], atol=1e-6)
    assert mha(params, x[..., :0, :]).shape == (2, 3, 0, 8)


def test_weights_come_with_the_output_and_sum_to_one():
    params = init_mha(jax.random.key(0), width=8, heads=2)
    x = drawn((3, 5, 8))
    out, weights = mha(params, x, mask=Lengths(kv=np.array([5, 2, 1])), return_weights=True)
    assert out.shape == (3, 5, 8)
    assert weights.shape == (3, 2, 5, 5)
    np.testing.assert_allclose(weights.sum(-1), np.ones((3, 2, 5)), atol=1e-6)
    assert not weights[1, ..., 2:].any()


def test_gradients_equal_differences():
    with jax.enable_x64(True):
        params = init_mha(jax.random.key(0), width=6, heads=2, kv_heads=1, key_width=4, bias=True, dtype=jnp.float64)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 6)))
        check_grads(
            lambda params, x: mha(params, x, mask=Causal(), rotary=Rotary()),
            (params, x),
            order=2,
            atol=1e-7,
            rtol=1e-7,
            eps=1e-6,
        )


def test_dtypes_promote_and_precision_is_kept():
    params = init_mha(jax.random.key(0), width=8, heads=2)
    half = jax.tree.map(lambda param: param.astype(jnp.bfloat16), params)
    x = drawn((1, 3, 8))
    assert mha(params, x.astype(jnp.bfloat16)).dtype == jnp.float32
    assert mha(half, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


REFUSED = {
    "names": (lambda p, x: mha({**p, "w": p["q"]}, x), TypeError, "params must hold q, k, v and out"),
    "missing": (lambda p, x: mha({"q": p["q"]}, x), TypeError, "params must hold q, k, v and out"),
    "no mapping": (lambda p, x: mha(list(p.values()), x), TypeError, "params must hold"),
    "width": (lambda p, x: mha(p, x[..., :7]), ValueError, "the axis W must have one length"),
    "axes": (lambda p, x: mha({**p, "q": p["q"][0]}, x), ValueError, r"q must have the axes \(W, H, D\)"),
    "heads": (lambda p, x: mha({**p, "out": p["out"][:1]}, x), ValueError, "the axis H must have one length"),
    "integers": (lambda p, x: mha(p, jnp.ones((2, 3, 8), int)), TypeError, "x must be an array of floats"),
    "list": (lambda p, x: mha(p, [[1.0]]), TypeError, "x must be an array of floats"),
    "batch": (lambda p, x: mha(p, x, x[:1]), ValueError, "the same batch axes"),
    "rank": (lambda p, x: mha(p, x[0, 0]), ValueError, "an axis of positions"),
    "rotary": (lambda p, x: mha(p, x[:, :1], x, rotary=Rotary()), ValueError, "q_positions=S - T"),
    "mask": (lambda p, x: mha(p, x, mask=jnp.ones((3, 3))), TypeError, "mask"),
    "head count": (lambda p, x: init_mha(jax.random.key(0), 8, 3), ValueError, "multiple of the heads H"),
    "grouping": (lambda p, x: init_mha(jax.random.key(0), 8, 4, kv_heads=3), ValueError, "multiple of the key/value"),
    "zero heads": (lambda p, x: init_mha(jax.random.key(0), 8, 0), ValueError, "at least 1"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_name(call, error, text, plain_errors):
    params, x = init_mha(jax.random.key(0), width=8, heads=2), drawn((2, 3, 8))
    with pytest.raises(error, match=text):
        call(params, x)
