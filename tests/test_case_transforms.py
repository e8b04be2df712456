"""Cases of tests/cases/attention.json whose answer is a rule: dropout, transformations, dtypes, bits and resources."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases.ours import CASES, close, expected, gradients, inputs, kernels, operands, same_bits, weighing_kernels
from jax import export
from jaxprs import equations

import attention_jax as aj

# ---------------------------------------------------------------- dropout


def realised(name, rate, key, kernel, mask=None, **more):
    """The weights that dropout leaves, and the weights before it."""
    q, k, _ = operands(name)
    identity = jnp.broadcast_to(jnp.eye(k.shape[-2]), (*k.shape[:-1], k.shape[-2]))
    call = functools.partial(aj.attention, q, k, identity, mask, implementation=kernel, **more)
    return call(dropout=(rate, key)), call()


@kernels
def test_dr01_a_weight_is_dropped_or_scaled_and_the_gradient_uses_the_same_weights(kernel):
    key = jax.random.key(7)
    left, whole = realised("DR-01", 0.25, key, kernel, aj.Causal())
    kept = np.asarray(left != 0)
    close(left, np.where(kept, whole / 0.75, 0))
    assert 0 < (~kept & (np.asarray(whole) > 0)).sum() < (np.asarray(whole) > 0).sum()
    q, k, v = operands("DR-01")
    cotangent = jnp.asarray(oracle.exact(5, *v.shape), jnp.float32)
    call = functools.partial(aj.attention, mask=aj.Causal(), dropout=(0.25, key), implementation=kernel)
    close(call(q, k, v), left @ v)
    problem = oracle.Problem(q, k, v, np.tri(6, dtype=bool), keep=kept / 0.75)
    truth = oracle.vjp(problem, cotangent)
    close(gradients(call, q, k, v, cotangent), tuple(truth[n] for n in "qkv"))


@kernels
def test_dr03_one_key_drops_the_same_weights_in_every_setting(kernel):
    q, k, v = operands("DR-03")
    dropout = (0.25, jax.random.key(11))
    left, _ = realised("DR-03", *dropout, kernel)
    cotangent = jnp.asarray(oracle.exact(5, *q.shape), jnp.float32)
    values = left.swapaxes(-1, -2) @ cotangent
    call = functools.partial(aj.attention, dropout=dropout, implementation=kernel)
    for run in (call, jax.jit(jax.checkpoint(call))):
        close(gradients(run, q, k, v, cotangent)[2], values)
        close(run(q, k, v), left @ v)


@kernels
@pytest.mark.parametrize("key", [None, "key", "legacy"])
def test_dr04_dr07_rate_zero_and_no_dropout_are_the_same_bits_and_need_no_key(kernel, key):
    q, k, v = operands("DR-04")
    made = {None: None, "key": jax.random.key(1), "legacy": jax.random.PRNGKey(1)}[key]
    call = functools.partial(aj.attention, q, k, v, implementation=kernel)
    same_bits(call(dropout=(0.0, made)), call())
    same_bits(call(dropout=None), call())


@kernels
@pytest.mark.parametrize("traced", [False, True])
def test_dr06_rate_one_gives_zeros_and_no_gradient(kernel, traced):
    q, k, v = operands("DR-06")

    def call(q, k, v, rate=1.0):
        return aj.attention(q, k, v, dropout=(rate, jax.random.key(0)), implementation=kernel)

    run = jax.jit(call) if traced else call
    rate = (jnp.float32(1.0),) if traced else ()
    assert (run(q, k, v, *rate) == 0).all()
    for gradient in gradients(lambda *a: run(*a, *rate), q, k, v, jnp.ones_like(v)):
        assert (gradient == 0).all()


@kernels
def test_dropout_keeps_the_share_it_says_and_treats_places_alike(kernel):
    key = jax.random.key(23)
    q, k = jnp.zeros((2, 3, 64, 1)), jnp.zeros((2, 1, 64, 1))
    identity = jnp.broadcast_to(jnp.eye(64), (2, 1, 64, 64))
    kept = np.asarray(aj.attention(q, k, identity, dropout=(0.3, key), implementation=kernel)) > 0
    for axes in [(0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:
        share, count = kept.mean(axes), kept.size / np.prod([kept.shape[i] for i in set(range(4)) - set(axes)])
        assert np.abs(share - 0.7).max() < 5 * np.sqrt(0.21 / count)
    other = np.asarray(aj.attention(q, k, identity, dropout=(0.3, jax.random.key(24)), implementation=kernel)) > 0
    for a, b in [(kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept, other)]:
        assert abs((a == b).mean() - 0.58) < 0.03  # 0.7² + 0.3²: independent


@kernels
def test_dropout_under_vmap_repeats_the_pattern_of_one_key_and_follows_many(kernel):
    q, k = jnp.zeros((3, 2, 6, 1)), jnp.zeros((3, 1, 6, 1))
    identity = jnp.broadcast_to(jnp.eye(6), (3, 1, 6, 6))

    def call(q, k, v, key):
        return aj.attention(q, k, v, dropout=(0.5, key), implementation=kernel)

    keys = jax.random.split(jax.random.key(1), 3)
    one = jax.vmap(call, (0, 0, 0, None))(q, k, identity, keys[0])
    many = jax.vmap(call)(q, k, identity, keys)
    for n in range(3):
        same_bits(one[n], call(q[n], k[n], identity[n], keys[0]))
        same_bits(many[n], call(q[n], k[n], identity[n], keys[n]))


# ---------------------------------------------------------------- transformations


@kernels
def test_bg06_a_table_of_relative_biases_gets_its_gradient(kernel):
    case = inputs("BG-06")

    def call(table):
        return aj.attention(*operands("BG-06"), bias=table[case["idx"]][None, None], implementation=kernel)

    close(jax.vjp(call, case["table"])[1](case["do"])[0], CASES["BG-06"].expected["dtable"])


@kernels
def test_tr01_vmap_of_grad_gives_each_examples_gradients(kernel):
    (q, k, v), do = operands("TR-01"), inputs("TR-01")["do"]
    call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
    each = jax.vmap(functools.partial(gradients, call))(q, k, v, do)
    close(each, tuple(expected("TR-01", f"d{n}") for n in "qkv"))


@kernels
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_tr03_forward_mode_and_second_order_are_right(kernel, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = inputs("TR-03", dtype)
        point, along = tuple(x[n] for n in "qkv"), tuple(x[f"t{n}"] for n in "qkv")
        call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
        tolerance = CASES["TR-03"].tolerance[dtype]
        close(jax.jvp(call, point, along)[1], expected("TR-03", "jvp_out"), tolerance)
        moved = jax.jvp(lambda *a: gradients(call, *a, x["do"])[0], point, along)[1]
        close(moved, expected("TR-03", "d_dq"), tolerance)


@kernels
def test_tr04_jit_checkpoint_and_scan_change_no_gradient(kernel):
    (q, k, v), do = operands("TR-04"), inputs("TR-04")["do"]
    call = functools.partial(aj.attention, implementation=kernel)

    def scanned(q, k, v):
        return jax.lax.scan(lambda carry, x: (carry, call(*x)), 0.0, jax.tree.map(lambda x: x[None], (q, k, v)))[1][0]

    plain = gradients(call, q, k, v, do)
    truth = oracle.vjp(oracle.Problem(q, k, v), do)
    close(plain, tuple(truth[n] for n in "qkv"))
    for run in (jax.jit(call), jax.checkpoint(call), jax.checkpoint(jax.jit(call)), scanned, jax.jit(scanned)):
        close(gradients(run, q, k, v, do), plain, 1e-6)


@kernels
@pytest.mark.parametrize("batch", ["2", "b"])
@pytest.mark.usefixtures("plain_errors")  # a symbolic size is no int
def test_tr05_forward_and_gradient_can_be_exported(kernel, batch):
    (q, k, v), mask = operands("TR-05"), aj.Causal() & aj.Lengths(kv=3)

    def call(q, k, v):
        return aj.attention(q, k, v, mask, implementation=kernel)

    def backward(q, k, v):
        return gradients(call, q, k, v, jnp.ones_like(q))

    (size,) = export.symbolic_shape(batch)
    specs = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    for fn in (call, backward):
        kept = export.export(jax.jit(fn), platforms=["cpu", "cuda", "tpu"])(*specs).serialize()
        close(export.deserialize(kept).call(q, k, v), fn(q, k, v), 1e-6)


# ---------------------------------------------------------------- dtypes, bits, resources


@kernels
def test_dc01_masks_and_biases_of_every_rank_need_no_promotion(kernel):
    assert jax.config.jax_numpy_rank_promotion == "raise"
    q = jnp.ones((2, 2, 3, 4))
    for shape in [(1, 3), (3, 1), (2, 1, 1, 3)]:
        mask, bias = np.ones(shape, bool), jnp.ones(shape)

        def loss(q, k, v, bias, mask=mask):
            return aj.attention(q, k, v, mask, bias=bias, implementation=kernel).sum()

        for gradient, like in zip(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, q, q, bias), (q, q, q, bias), strict=True):
            assert gradient.shape == like.shape


@weighing_kernels
def test_dc03_float32_stays_float32_under_x64(kernel):
    with jax.enable_x64(True):
        q, bias = jnp.ones((2, 2, 3, 4), jnp.float32), jnp.ones((3, 3), jnp.float32)
        mask = aj.Causal() & aj.Lengths(kv=np.array([2, 3])) & aj.Segments(np.array([0, 0, 1]))

        def call(q, k, v, bias):
            more = {"dropout": (0.5, jax.random.key(0)), "return_lse": True, "return_weights": True}
            return aj.attention(q, k, v, mask, bias=bias, **more, implementation=kernel)

        found, pullback = jax.vjp(call, q, q, q, bias)
        assert {x.dtype for x in found} == {jnp.dtype("float32")}
        assert {x.dtype for x in pullback(found)} == {jnp.dtype("float32")}


@kernels
def test_dt01_the_same_call_gives_the_same_bits(kernel):
    x = inputs("DT-01")

    def call(q, k, v, bias):
        return aj.attention(q, k, v, aj.Causal(), bias=bias, implementation=kernel)

    def both():
        out, pullback = jax.vjp(call, x["q"], x["k"], x["v"], x["bias"])
        return out, pullback(x["do"])

    first = both()
    for _ in range(4):
        same_bits(both(), first)


@kernels
def test_dt04_an_example_does_not_depend_on_its_batch_mates(kernel):
    call = functools.partial(aj.attention, mask=aj.Causal(), implementation=kernel)
    q, k, v = operands("DT-04")
    alone = call(q[:1], k[:1], v[:1])[0]
    beside = call(q, k, v)[0]
    close(beside, alone, 1e-6)
    for junk in (7.0, np.nan, np.inf):
        same_bits(call(*(x.at[1].set(junk) for x in (q, k, v)))[0], beside)


@kernels
def test_rs01_no_counter_of_pairs_can_overflow(kernel):
    q = jax.ShapeDtypeStruct((1, 1, 65536, 8), jnp.float32)

    def call(q, k, v):
        mask = aj.Causal() & aj.Window(9, None) & aj.Lengths(kv=5) & aj.Segments(np.zeros(65536, np.int32))
        return aj.attention(q, k, v, mask, dropout=(0.1, jax.random.key(0)), implementation=kernel)

    jaxpr = jax.make_jaxpr(lambda *a: jax.vjp(call, *a)[1](a[0]))(q, q, q)
    for equation in equations(jaxpr.jaxpr):
        if equation.primitive.name == "mul" and equation.outvars[0].aval.dtype == jnp.int32:
            assert equation.outvars[0].aval.size < 65536, equation


@kernels
@pytest.mark.parametrize("start", [70_000, 2**30 - 8, 2 - 2**30])
def test_rs01_far_positions_give_the_right_mask(kernel, start):
    q = jnp.asarray(oracle.exact(1, 1, 3, 2), jnp.float32)
    k = jnp.asarray(oracle.exact(2, 1, 6, 2), jnp.float32)
    for rule, mask in [(oracle.causal, aj.Causal()), (oracle.window(2, 1), aj.Window(2, 1))]:
        for kv_start in (start - 2, 0):
            where = {"q_positions": start, "kv_positions": kv_start}
            truth = oracle.attention(oracle.Problem(q, k, k, oracle.visible(rule, (1, 3, 6), **where)))
            close(aj.attention(q, k, k, mask, **where, implementation=kernel), truth.out)


@pytest.mark.usefixtures("plain_errors")
@pytest.mark.parametrize("far", [2**30 + 1, -(2**30) - 1, 2**40, [0, 1, 2**31 - 1], [0, 1, -(2**31)]])
def test_rs01_positions_beyond_the_limit_are_refused(far):
    q, far = jnp.ones((1, 3, 2)), far if isinstance(far, int) else np.asarray(far, np.int32)
    with pytest.raises(ValueError, match=r"2\^30"):
        aj.attention(q, q, q, aj.Causal(), q_positions=far)
