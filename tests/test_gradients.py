"""What `attention` has gradients for, and what reverse mode keeps for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads
from jaxprs import equations

import attention_jax as aj
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)


def assert_same(a, b):
    np.testing.assert_allclose(a, b, 1e-9, 1e-9)


@kernels
@pytest.mark.parametrize(
    "axes", [(4, 5), (1, 5), (4, 1), (1, 1), (2, 4, 4, 5), (2, 1, 1, 5), (1, 4, 4, 1), (1, 1, 1, 1)]
)
def test_the_gradient_of_a_bias_is_summed_over_the_axes_that_it_was_broadcast_along(kernel, axes):
    q, k, v = (oracle.exact(n, 2, heads, rows, 3) for n, heads, rows in ((1, 4, 4), (2, 2, 5), (3, 2, 5)))
    bias, dout, visible = oracle.exact(4, *axes), oracle.exact(5, *q.shape), np.tri(4, 5, 1, dtype=bool)
    truth = oracle.vjp(oracle.Problem(q, k, v, visible, bias), dout)["bias"]
    with jax.enable_x64(True):
        call = functools.partial(aj.attention, *map(jnp.asarray, (q, k, v)), visible, implementation=kernel)
        assert_same(jax.jit(lambda b, d: jax.vjp(lambda b: call(bias=b), b)[1](d)[0])(bias, dout), truth)


@kernels
@pytest.mark.parametrize("axes", [(), (1, 1, 1, 1), (1, 4, 1, 1), (2, 1, 4, 1), (2, 4, 4, 1)])
def test_an_array_scale_has_its_gradient_and_tangent(kernel, axes):
    q, k, v = (oracle.exact(n, 2, heads, rows, 3) for n, heads, rows in ((1, 4, 4), (2, 2, 5), (3, 2, 5)))
    scale, along, dout = oracle.exact(4, *axes) / 4, oracle.exact(6, *axes), oracle.exact(5, *q.shape)
    problem = oracle.Problem(q, k, v, np.tri(4, 5, 1, dtype=bool), scale=scale)
    with jax.enable_x64(True):

        def call(scale):
            return aj.attention(*map(jnp.asarray, (q, k, v)), problem.visible, scale=scale, implementation=kernel)

        scale, along = jnp.asarray(scale), jnp.asarray(along)
        assert_same(jax.jit(call)(scale), oracle.attention(problem).out)
        assert_same(jax.jit(lambda s, d: jax.vjp(call, s)[1](d)[0])(scale, dout), oracle.vjp(problem, dout)["scale"])
        moved = jax.jit(lambda s, t: jax.jvp(call, (s,), (t,))[1])(scale, along)
        assert_same(moved, oracle.jvp(problem, {"scale": along})[0])


@kernels
def test_the_gradient_of_a_dropout_rate_is_that_of_the_factor_of_what_is_kept(kernel):
    q, k, v, dout = (jnp.asarray(oracle.exact(n, 2, 8, 4), jnp.float32) for n in range(4))

    def call(rate):
        return aj.attention(q, k, v, dropout=(rate, jax.random.key(3)), implementation=kernel)

    rate = jnp.float32(0.25)
    out, pullback = jax.vjp(call, rate)
    np.testing.assert_allclose(pullback(dout)[0], (out * dout).sum() / 0.75, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(call, (rate,), (jnp.float32(1),))[1], out / 0.75, rtol=1e-5)


@kernels
def test_masks_and_positions_are_arguments_without_gradients(kernel):
    q, k, v = (jnp.ones((2, 1, 4, 2)) for _ in range(3))

    def call(q, mask, at):
        return aj.attention(q, k, v, mask, q_positions=at, implementation=kernel).sum()

    mask, at = aj.Causal() & aj.Lengths(kv=jnp.array([1, 3])), jnp.arange(4)
    _, d_mask, d_at = jax.grad(call, (0, 1, 2), allow_int=True)(q, mask, at)
    assert d_at.dtype == jax.dtypes.float0
    assert {x.dtype for x in jax.tree.leaves(d_mask)} == {jax.dtypes.float0}


# ---------------------------------------------------------------- what is kept


def kept(kernel, length, **options):
    """Shapes of what the pullback of a call keeps."""
    q, k, v = (jnp.ones((2, length, 4), jnp.float32) for _ in range(3))
    _, pullback = jax.vjp(lambda *x: aj.attention(*x, **options, implementation=kernel, return_lse=True), q, k, v)
    return [x.shape for x in jax.tree.leaves(pullback)]


@kernels
@pytest.mark.parametrize(
    "options",
    [{}, {"mask": aj.Causal() & aj.Lengths(kv=70)}, {"dropout": (0.1, jax.random.key(0))}, {"scale": jnp.float32(0.1)}],
    ids=lambda options: "".join(options),
)
def test_what_reverse_mode_keeps_is_linear_in_the_length(kernel, options):
    sizes = {}
    for length in (80, 160):
        shapes = kept(kernel, length, **options)
        assert all(shape.count(length) < 2 for shape in shapes), shapes
        sizes[length] = sum(map(np.prod, shapes))
    operands = 3 * 2 * 80 * 4
    assert sizes[80] < 2.5 * operands  # (q, k, v, out, lse), perhaps with a scaled q
    assert sizes[160] - sizes[80] <= sizes[80]


@kernels
def test_a_policy_that_saves_output_and_log_sum_exp_does_not_run_the_forward_pass_again(kernel):
    q, k, v = (jnp.ones((2, 40, 4), jnp.float32) for _ in range(3))
    save = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

    def recomputed(**policy):
        fn = jax.checkpoint(functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel), **policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda *x: (fn(*x) ** 2).sum(), (0, 1, 2)))(q, k, v)
        again = [e for e in equations(jaxpr.jaxpr) if e.primitive.name.startswith("remat")]
        return {i.params["name"] for e in again for i in equations(e.params["jaxpr"]) if i.primitive.name == "name"}

    assert recomputed() == {"attention_out", "attention_lse"}
    assert not recomputed(policy=save)


@kernels
def test_three_orders_equal_differences(kernel):
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(oracle.exact(n, heads, 7, 3)) for n, heads in ((1, 2), (2, 1), (3, 1)))
        bias = jnp.asarray(oracle.exact(4, 1, 1, 7))

        @jax.jit
        def call(q, k, v, bias):
            return aj.attention(q, k, v, aj.Window(3, 1), bias=bias, implementation=kernel, return_lse=True)

        check_grads(call, (q, k, v, bias), order=3, modes=("fwd", "rev"))
