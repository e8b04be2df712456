"""Hidden is said of a pair: junk reaches exactly what may see it, forwards and backwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import attention_jax as aj
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)


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


@kernels
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_junk_in_a_key_reaches_exactly_the_rows_that_may_attend_to_it(kernel, where, junk):
    q, k, v = operands(batch=(2,))
    run = jax.jit(functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel))
    x = {"q": q, "k": k, "v": v}
    clean = run(**x)
    out = run(**(x | {where: x[where].at[0, 1, 3].set(junk)}))  # heads 2 and 3 of example 0 read it
    touched = np.zeros((2, 4, 5), bool)
    touched[0, 2:, 3:] = True
    if not (where == "k" and np.isinf(junk)):  # an infinite key may only say that a weight is 0
        assert not np.isfinite(out[touched]).any()
    same_bits(out[~touched], clean[~touched])


@kernels
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_sees_no_junk_keeps_its_bits(kernel, where):
    """At a size where the compiler makes one loop of a pass without junk."""
    x = {name: jax.random.normal(jax.random.key(n), (4, 8, 256, 64)) for n, name in enumerate("qkv")}
    run = jax.jit(functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel))
    clean, out = run(**x), run(**(x | {where: x[where].at[1, 2, -1].set(np.nan)}))
    assert np.isnan(out[1, 2, -1]).all()
    same_bits(out.at[1, 2, -1].set(0), clean.at[1, 2, -1].set(0))


@kernels
def test_products_of_large_numbers_that_are_no_number_are_hidden_too(kernel):
    q, k, v = (jnp.asarray(oracle.exact(n, 2, 6, 4), jnp.float32) for n in range(3))
    q = q.at[:, :, :2].set(4.0)
    run = jax.jit(functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel))
    out = run(q, k.at[:, 5, :2].set(jnp.asarray([3e38, -3e38])), v)  # inf - inf with every row
    np.testing.assert_allclose(out[:, :5], run(q, k, v)[:, :5], 1e-6, 1e-6)
    assert np.isnan(out[:, 5]).all()


def test_a_row_that_sees_logits_of_minus_infinity_alone_is_not_one_that_sees_nothing():
    q, k, v = (jnp.ones((2, 6, 4)) for _ in range(3))
    call = functools.partial(aj.attention, mask=aj.Causal(), implementation="dense")
    out = jax.jit(call)(q, k.at[:, 0].set(-np.inf), v)
    assert np.isnan(out[:, 0]).all()
    np.testing.assert_allclose(out[:, 1:], 1.0, 1e-6)


@kernels
@pytest.mark.parametrize("where", ["q", "cotangent"])
def test_junk_in_a_row_reaches_exactly_the_gradients_of_keys_that_it_may_attend_to(kernel, where):
    q, k, v = operands()
    mask, dout = aj.Window(1, 0), jnp.ones((4, 5, 2))

    @jax.jit
    def run(q, k, v, dout):
        return jax.vjp(lambda *x: aj.attention(*x, mask, implementation=kernel), q, k, v)[1](dout)

    clean = run(q, k, v, dout)
    if where == "q":
        q = q.at[0, 3].set(jnp.nan)
    else:
        dout = dout.at[0, 3].set(jnp.nan)
    dq, dk, dv = run(q, k, v, dout)
    rows, keys = np.zeros((4, 5), bool), np.zeros((2, 5), bool)
    rows[0, 3] = keys[0, 2:4] = True
    for found, was, touched in ((dq, clean[0], rows), (dk, clean[1], keys), (dv, clean[2], keys)):
        assert np.isnan(found[touched]).all()
        same_bits(found[~touched], was[~touched])


@kernels
def test_a_key_hidden_from_every_row_has_gradients_of_exactly_zero(kernel):
    q, k, v = operands()
    for junk in (0.0, np.nan, np.inf):
        call = functools.partial(aj.attention, mask=aj.Lengths(kv=3), implementation=kernel)
        _, _, dk, dv = with_gradients(call, q, k.at[:, 3:].set(junk), v.at[:, 3:].set(junk))
        assert (dk[:, 3:] == 0).all()
        assert (dv[:, 3:] == 0).all()
        assert np.isfinite(dk).all()


@kernels
@pytest.mark.parametrize("junk", [0.0, np.nan])
def test_a_row_that_sees_nothing_gives_zeros_and_passes_no_gradient(kernel, junk):
    q, k, v = operands()
    q = q.at[:, 3:].set(junk)
    call = functools.partial(aj.attention, mask=aj.Lengths(q=3), implementation=kernel)
    out, lse = call(q, k, v, return_lse=True)
    assert (out[:, 3:] == 0).all()
    assert (lse[:, 3:] == -np.inf).all()
    _, dq, dk, dv = with_gradients(call, q, k, v)
    assert (dq[:, 3:] == 0).all()
    alone = with_gradients(functools.partial(aj.attention, implementation=kernel), q[:, :3], k, v)
    for found, expected in zip((out[:, :3], dq[:, :3], dk, dv), alone, strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@kernels
def test_nothing_is_nan_on_the_way_where_nothing_is_nan_at_the_end(kernel):
    q, k, v = operands()
    with jax.debug_nans(True), jax.debug_infs(True):
        call = functools.partial(aj.attention, mask=aj.Lengths(kv=3, q=3) & aj.Causal(), implementation=kernel)
        jax.block_until_ready(jax.jit(functools.partial(with_gradients, call))(q, k, v))
