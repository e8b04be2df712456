"""Cases of tests/cases/attention.json whose answer is a rule: refusals, empty rows, shapes and layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases.ours import CASES, close, expected, gradients, inputs, kernels, operands, same_bits, weighing_kernels

import attention_jax as aj

# ---------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("plain_errors")
@kernels
def test_fm06_an_integer_mask_is_refused_with_the_remedy(kernel):
    with pytest.raises(TypeError, match="mask != 0"):
        aj.attention(*operands("FM-06"), inputs("FM-06")["mask"], implementation=kernel)


@pytest.mark.usefixtures("plain_errors")
@kernels
def test_dc04_integers_are_refused_as_operands(kernel):
    q, k, v = (jnp.asarray(x.swapaxes(1, 2)) for x in (CASES["DC-04"].inputs[key] for key in "qkv"))
    with pytest.raises(TypeError, match="q must hold floats"):
        aj.attention(q, k, v, implementation=kernel)
    with pytest.raises(TypeError, match="k must hold floats"):
        aj.attention(q.astype(jnp.float32), k, v, implementation=kernel)


@kernels
def test_ms05_a_mask_of_two_axes_is_queries_by_keys_whatever_the_batch(kernel):
    (q, k, v), m2 = operands("MS-05:as (Tq,Tk)"), CASES["MS-05:as (Tq,Tk)"].inputs["m2"]
    close(aj.attention(q, k, v, m2, implementation=kernel), expected("MS-05:as (Tq,Tk)", "out"))


@pytest.mark.usefixtures("plain_errors")
@kernels
@pytest.mark.parametrize("as_bias", [False, True])
def test_ms06_a_mask_of_three_axes_is_refused_for_a_batch(kernel, as_bias):
    (q, k, v), m3 = operands("MS-06:as (B,Tq,Tk)"), CASES["MS-06:as (B,Tq,Tk)"].inputs["m3"]
    option = {"bias": jnp.asarray(m3, jnp.float32)} if as_bias else {"mask": m3}
    with pytest.raises(ValueError, match=r"\(2, 2, 3\)"):
        aj.attention(q, k, v, **option, implementation=kernel)


@pytest.mark.usefixtures("plain_errors")
@kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (2, 4), (4, 0)])
def test_gq05_head_counts_that_do_not_divide_are_refused_by_both_counts(kernel, heads, kv_heads):
    q, k = jnp.zeros((1, heads, 2, 2)), jnp.zeros((1, kv_heads, 2, 2))
    with pytest.raises(ValueError, match=rf"(?s)head.*\(1, {heads}, 2, 2\).*\(1, {kv_heads}, 2, 2\)"):
        aj.attention(q, k, k, implementation=kernel)


# ---------------------------------------------------------------- empty rows, weights, stability


@kernels
def test_fm07_a_row_of_the_most_negative_bias_stays_inside_the_values(kernel):
    (q, k, v), bias = operands("FM-07"), inputs("FM-07")["bias"]
    row = aj.attention(q, k, v, bias=bias, implementation=kernel)[0, 0, 0]
    assert (row >= v.min((0, 1, 2))).all()
    assert (row <= v.max((0, 1, 2))).all()


@weighing_kernels
def test_fm08_the_entropy_of_weights_has_a_finite_gradient(kernel):
    (q, k, v), mask = operands("FM-08"), inputs("FM-08")["mask"]

    def entropy(q):
        weights = aj.attention(q, k, v, mask, return_weights=True, implementation=kernel)[1]
        seen = weights > 0
        return -jnp.where(seen, weights * jnp.log(jnp.where(seen, weights, 1)), 0).sum()

    gradient = jax.jit(jax.grad(entropy))(q)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0.01
    assert (gradient[0, 0, 1] == 0).all()  # the row that sees nothing


@weighing_kernels
def test_mc01_asking_for_weights_changes_nothing_else(kernel):
    call = functools.partial(aj.attention, *operands("MC-01"), aj.Causal(), implementation=kernel)
    close(call(return_weights=True)[0], call(), 1e-6)
    close(call(return_weights=True, return_lse=True)[:2], call(return_lse=True), 1e-6)


@kernels
def test_mc01_dropout_lets_no_row_see_the_future(kernel):
    q, k, v = operands("MC-01")
    call = functools.partial(aj.attention, q, mask=aj.Causal(), dropout=(0.5, jax.random.key(3)), implementation=kernel)
    changed = call(k.at[:, :, 3].add(5.0), v.at[:, :, 3].set(9.0))
    same_bits(call(k, v)[:, :, :3], changed[:, :, :3])


@kernels
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_mv07_the_checkers_of_nan_and_inf_have_nothing_to_say(kernel, dtype):
    with jax.enable_x64(dtype == "float64"), jax.debug_nans(True), jax.debug_infs(True):
        (q, k, v), mask = operands("MV-07", dtype), CASES["MV-07"].inputs["mask"]
        call = functools.partial(aj.attention, mask=mask, implementation=kernel)
        same_bits(call(q, k, v), np.ones(q.shape))
        jax.block_until_ready(jax.jit(functools.partial(gradients, call))(q, k, v, jnp.ones_like(q)))


@kernels
def test_os13_one_key_gives_its_value_exactly(kernel):
    (q, k, v), bias = operands("OS-13"), inputs("OS-13")["bias"]
    call = functools.partial(aj.attention, scale=1.0, implementation=kernel)
    same_bits(call(q, k, v, bias=bias), v)
    cotangent = inputs("OS-13")["do"]
    assert (jax.vjp(lambda bias: call(q, k, v, bias=bias), bias)[1](cotangent)[0] == 0).all()


@kernels
def test_st04_parts_over_keys_merge_by_their_log_sum_exp(kernel):
    q, k, v = operands("ST-04")
    call = functools.partial(aj.attention, return_lse=True, implementation=kernel)
    parts = [call(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(3), slice(3, None))]
    whole = jnp.logaddexp(parts[0][1], parts[1][1])
    close(whole, CASES["ST-04"].expected["lse"])
    close(sum(out * jnp.exp(lse - whole)[..., None] for out, lse in parts), expected("ST-04", "out"))


# ---------------------------------------------------------------- shapes and layouts


@kernels
def test_os04_a_length_just_above_a_power_of_two_is_like_any_other(kernel):
    q, k, v = operands("OS-04")
    call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
    truth = oracle.attention(oracle.Problem(q, k, v, np.tri(1025, dtype=bool)))
    close(call(q, k, v), truth.out)
    for length in (257, 513):
        close(call(*(x[:, :, :length] for x in (q, k, v))), truth.out[:, :, :length])


@kernels
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 5), (2, 0, 5), (2, 0, 0), (2, 3, 0), (0, 0, 0)])
def test_os06_empty_arrays_give_empty_answers_and_gradients(kernel, jitted, batch, queries, keys):
    q, kv = jnp.ones((batch, 2, queries, 4)), jnp.ones((batch, 2, keys, 4))
    call = functools.partial(aj.attention, implementation=kernel, return_lse=True)
    out, lse = (jax.jit(call) if jitted else call)(q, kv, kv)
    assert out.shape == (batch, 2, queries, 4)
    assert (out == 0).all()
    assert lse.shape == (batch, 2, queries)
    assert (lse == -np.inf).all()
    backward = jax.grad(lambda *a: call(*a)[0].sum(), (0, 1, 2))
    for gradient, like in zip((jax.jit(backward) if jitted else backward)(q, kv, kv), (q, kv, kv), strict=True):
        assert gradient.shape == like.shape
        assert (gradient == 0).all()


@pytest.mark.usefixtures("plain_errors")
@kernels
def test_os06_no_heads_are_a_clear_error(kernel):
    empty = jnp.zeros((1, 0, 3, 4))
    with pytest.raises(ValueError, match="head"):
        aj.attention(empty, empty, empty, implementation=kernel)


@kernels
@pytest.mark.parametrize("view", ["swapped axes", "negative stride", "every second", "fortran order", "read-only"])
def test_os14_strides_change_no_bit(kernel, view):
    straight = [np.asarray(x) for x in operands("OS-14")]

    def strided(x):
        doubled = np.repeat(x, 2, axis=-1)
        return {
            "swapped axes": lambda: jnp.swapaxes(jnp.asarray(np.ascontiguousarray(x.swapaxes(1, 2))), 1, 2),
            "negative stride": lambda: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
            "every second": lambda: doubled[..., ::2],
            "fortran order": lambda: np.asfortranarray(x),
            "read-only": lambda: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
        }[view]()

    call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
    same_bits(call(*straight), call(*map(strided, straight)))


@kernels
def test_sg04_packed_documents_equal_documents_alone(kernel):
    (q, k, v), do, ids = operands("SG-04"), inputs("SG-04")["do"], CASES["SG-04"].inputs["seg"]

    def call(q, k, v, mask):
        return aj.attention(q, k, v, mask, implementation=kernel)

    def both(q, k, v, do, mask):
        out, pullback = jax.vjp(lambda *a: call(*a, mask), q, k, v)
        return out, *pullback(do)

    packed = both(q, k, v, do, aj.Causal() & aj.Segments(ids))
    alone = [both(*(x[:, :, rows] for x in (q, k, v, do)), aj.Causal()) for rows in (slice(3), slice(3, None))]
    close(packed, tuple(jnp.concatenate(parts, axis=2) for parts in zip(*alone, strict=True)))
