"""Numbers at the edge: dtypes, large and infinite logits, empty arrays, dropout, bits, and where it can run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import export

import attention_jax as aj
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)
DTYPES = ["float16", "bfloat16", "float32", "float64"]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-12}


def exact(*axes, seed=1, dtype="float32"):
    return jnp.asarray(oracle.exact(seed, *axes)).astype(dtype)


def operands(dtype="float32", queries=5, keys=5, batch=()):
    q, k, v = ((*batch, 4, queries, 3), (*batch, 2, keys, 3), (*batch, 2, keys, 2))
    return tuple(exact(*axes, seed=n, dtype=dtype) for n, axes in enumerate((q, k, v)))


def with_gradients(call, *x):
    """The output, and the gradients along a cotangent of ones."""
    out, pullback = jax.vjp(call, *x)
    return out, *pullback(jnp.ones_like(out))


def same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# ---------------------------------------------------------------- dtypes


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_output_has_the_dtype_of_q_and_the_softmax_is_float32_at_least(kernel, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = operands(dtype)
        call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel, return_lse=True)
        out, lse = jax.jit(call)(q, k, v)
        assert out.dtype == dtype
        assert lse.dtype == ("float64" if dtype == "float64" else "float32")
        truth = oracle.attention(oracle.Problem(q, k, v, np.tri(5, dtype=bool)))
        np.testing.assert_allclose(np.asarray(out, np.float64), truth.out, TOLERANCE[dtype], TOLERANCE[dtype])
        np.testing.assert_allclose(lse, truth.lse, 1e-12 if dtype == "float64" else 1e-5)


@kernels
@pytest.mark.parametrize("kinds", ["bfloat16 float32 float16", "float32 bfloat16 bfloat16", "float16 float16 float64"])
def test_operands_of_different_dtypes_are_promoted_and_gradients_keep_theirs(kernel, kinds):
    kinds = kinds.split()
    with jax.enable_x64(True):
        x = [a.astype(kind) for a, kind in zip(operands("float64"), kinds, strict=True)]
        call = functools.partial(aj.attention, implementation=kernel)
        out, *grads = jax.jit(functools.partial(with_gradients, call))(*x)
        assert [out.dtype, *(g.dtype for g in grads)] == [kinds[0], *kinds]
        truth = oracle.attention(oracle.Problem(*x)).out
        np.testing.assert_allclose(np.asarray(out, np.float64), truth, 0, TOLERANCE[kinds[0]])


@kernels
@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_a_bias_or_a_scale_of_another_dtype_is_welcome(kernel, kind):
    with jax.enable_x64(True):
        q, k, v = operands("bfloat16")
        bias, scale = exact(5, 5, dtype=kind), jnp.asarray(0.25, kind)
        out = aj.attention(q, k, v, bias=bias, scale=scale, implementation=kernel)
        assert out.dtype == jnp.bfloat16
        truth = oracle.attention(oracle.Problem(q, k, v, bias=bias, scale=0.25)).out
        np.testing.assert_allclose(np.asarray(out, np.float64), truth, 0, TOLERANCE["bfloat16"] * 2)


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_operands_are_as_good_as_jax_arrays(kernel, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, mask = operands(dtype), np.tri(5, dtype=bool)
        call = functools.partial(aj.attention, mask=mask, implementation=kernel)
        same_bits(call(*map(np.asarray, x)), call(*x))


@kernels
def test_float32_means_float32_products_unless_the_caller_says_otherwise(kernel):
    q, k, v = operands()

    def precisions(q, k, v):
        call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
        program = jax.jit(functools.partial(with_gradients, call)).lower(q, k, v).as_text()
        return [line for line in program.splitlines() if "dot_general" in line]

    highest = precisions(q, k, v)
    assert highest
    assert all("HIGHEST" in line for line in highest)
    with jax.default_matmul_precision("high"):
        assert not any("HIGHEST" in line for line in precisions(q, k, v))


# ---------------------------------------------------------------- large and infinite logits


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [30.0, 200.0])
def test_large_logits_neither_overflow_nor_vanish(kernel, dtype, size):
    with jax.enable_x64(dtype == "float64"):
        q, k, v = (size * exact(3, 4, seed=1, dtype=dtype), size * exact(3, 4, seed=2, dtype=dtype), exact(3, 4))
        v = v.astype(dtype)
        out, *grads = with_gradients(functools.partial(aj.attention, implementation=kernel), q, k, v)
        truth = oracle.attention(oracle.Problem(q, k, v)).out
        np.testing.assert_allclose(np.asarray(out, np.float64), truth, 0, max(TOLERANCE[dtype], 1e-3))
        assert all(np.isfinite(np.asarray(g, np.float64)).all() for g in grads)


@kernels
def test_a_common_shift_of_the_logits_changes_only_the_log_sum_exp(kernel):
    call = functools.partial(aj.attention, *operands(), implementation=kernel, return_lse=True)
    plain, shifted = call(bias=jnp.zeros((1, 1))), call(bias=jnp.full((1, 1), 64.0))
    np.testing.assert_allclose(shifted[0], plain[0], 1e-4, 1e-5)
    np.testing.assert_allclose(shifted[1], plain[1] + 64, 1e-6)


@kernels
@pytest.mark.parametrize("value", [-np.inf, np.finfo(np.float32).min, -1e30])
def test_a_bias_of_minus_infinity_hides_and_a_very_negative_one_does_not(kernel, value):
    q, k, v = operands()
    bias = jnp.zeros((5, 5)).at[:, 2].set(value).at[1].set(value)

    def call(bias):
        return aj.attention(q, k, v, bias=bias, implementation=kernel, return_lse=True)

    truth = oracle.attention(oracle.Problem(q, k, v, bias=np.asarray(bias)))
    (out, lse), pullback = jax.vjp(call, bias)
    np.testing.assert_allclose(out, truth.out, 1e-5, 1e-5)
    np.testing.assert_allclose(lse, truth.lse, 1e-5)
    assert (lse[:, 1] == -np.inf).all() == np.isinf(value)
    gradient = pullback((jnp.ones_like(out), jnp.ones_like(lse)))[0]
    assert np.isfinite(gradient).all()
    if np.isinf(value):
        assert (gradient[:, 2] == 0).all()
        assert (gradient[1] == 0).all()


@kernels
@pytest.mark.parametrize("junk", [np.nan, np.inf])
def test_a_bad_logit_at_a_visible_pair_reaches_its_row_and_no_other(kernel, junk):
    q, k, v = operands()
    bias = jnp.zeros((5, 5)).at[3, 1].set(junk)
    out = aj.attention(q, k, v, aj.Causal(), bias=bias, implementation=kernel)
    assert np.isnan(out[:, 3]).all()
    rest = np.array([0, 1, 2, 4])
    same_bits(out[:, rest], aj.attention(q, k, v, aj.Causal(), bias=jnp.zeros((5, 5)), implementation=kernel)[:, rest])


@kernels
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_a_bad_bias_at_a_hidden_pair_counts_for_nothing(kernel, junk):
    q, k, v = operands()
    hidden = np.triu(np.ones((5, 5), bool), 1)

    def call(q, k, v, bias):
        return aj.attention(q, k, v, aj.Causal(), bias=bias, implementation=kernel)

    run = jax.jit(functools.partial(with_gradients, call))
    same_bits(run(q, k, v, jnp.where(hidden, junk, 0.5)), run(q, k, v, jnp.full((5, 5), 0.5)))


# ---------------------------------------------------------------- empty arrays


@kernels
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 3), (2, 3, 0), (0, 3, 3)])
@pytest.mark.parametrize("mask", [aj.Causal(), aj.Lengths(kv=jnp.zeros((1,), int)), aj.Dense(np.ones((1, 1), bool))])
def test_empty_arrays_work_under_every_mask(kernel, mask, batch, queries, keys):
    q, k, v = operands(queries=queries, keys=keys, batch=(batch,))
    call = functools.partial(aj.attention, mask=mask, q_positions=0, implementation=kernel)
    for found, like in zip(jax.jit(functools.partial(with_gradients, call))(q, k, v), (q, q, k, v), strict=True):
        assert found.shape[:-1] == like.shape[:-1]
        assert (found == 0).all()


# ---------------------------------------------------------------- bits


@kernels
def test_the_same_call_gives_the_same_bits(kernel):
    x = operands(queries=37, keys=37, batch=(3,))
    run = jax.jit(functools.partial(with_gradients, functools.partial(aj.attention, implementation=kernel)))
    same_bits(run(*x), run(*x))


@kernels
def test_an_example_does_not_depend_on_its_batch_mates(kernel):
    x, kv = operands(queries=9, keys=9, batch=(3,)), jnp.array([4, 9, 0])

    def call(kv, q, k, v):
        mask = aj.Causal() & aj.Lengths(kv=kv)
        return with_gradients(functools.partial(aj.attention, mask=mask, implementation=kernel), q, k, v)

    whole = jax.jit(call)(kv, *x)
    others = jax.jit(call)(kv.at[1:].set(2), *(a.at[1:].set(jnp.nan) for a in x))
    same_bits(*(jax.tree.map(lambda a: a[0], found) for found in (whole, others)))


# ---------------------------------------------------------------- dropout


@kernels
def test_dropout_is_right_on_average(kernel):
    q, k, v = operands()
    call = functools.partial(aj.attention, q, k, v, aj.Causal(), implementation=kernel)
    many = jax.jit(jax.vmap(lambda key: call(dropout=(0.3, key))))(jax.random.split(jax.random.key(0), 3000))
    error = np.asarray(many.mean(0) - call())
    assert (np.abs(error) < 5 * np.asarray(many.std(0)) / np.sqrt(3000) + 1e-6).all()


@kernels
def test_dropout_leaves_the_log_sum_exp_alone(kernel):
    call = functools.partial(aj.attention, *operands(), implementation=kernel, return_lse=True)
    same_bits(call(dropout=(0.5, jax.random.key(1)))[1], call()[1])


@kernels
def test_a_position_changes_nothing_in_what_is_dropped(kernel):
    call = functools.partial(aj.attention, *operands(), dropout=(0.5, jax.random.key(1)), implementation=kernel)
    same_bits(call(q_positions=7, kv_positions=7), call())


# ---------------------------------------------------------------- wherever JAX runs it


@kernels
def test_every_platform_gets_a_program_for_any_batch(kernel, plain_errors):
    (size,) = export.symbolic_shape("b")
    axes = ((size, 4, 8, 4), (size, 2, 8, 4), (size, 2, 8, 4))
    specs = [jax.ShapeDtypeStruct(a, jnp.float32) for a in axes]
    key = jax.random.key(0)

    def call(q, k, v):
        return aj.attention(q, k, v, aj.Causal() & aj.Lengths(kv=5), dropout=(0.1, key), implementation=kernel)

    run = jax.jit(functools.partial(with_gradients, call))
    program = export.export(run, platforms=["cpu", "cuda", "tpu"])(*specs)
    x = [exact(3, *a[1:], seed=n) for n, a in enumerate(axes)]
    for found, expected in zip(program.call(*x), run(*x), strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
