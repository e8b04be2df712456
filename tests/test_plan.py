"""What `plan` says: the choice, the reasons, the shapes, and numbers that a hand can check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.cli.memory import temporaries
from attention_jax.kernels import KERNELS

kernels = pytest.mark.parametrize("kernel", KERNELS)


def shape(*axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(axes, dtype)


Q, K, V = shape(2, 4, 8, 16), shape(2, 2, 10, 16), shape(2, 2, 10, 6)


def test_the_printed_table_names_choice_reasons_shapes_and_costs(plain_errors):
    text = str(aj.plan(Q, K, V, implementation="dense"))
    rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert rows["implementation"].endswith("dense")
    assert rows["q"].endswith("float32[2, 4, 8, 16]")
    assert rows["v"].endswith("float32[2, 2, 10, 6]")
    assert "FLOP" in rows["forward"]
    assert "MiB" in rows["gradient"]
    for name in set(KERNELS) - {"dense"}:
        assert rows[f"not {name}"].strip()
    assert len({line.index(line.split("  ", 1)[1].strip()) for line in text.splitlines()}) == 1  # aligned


def test_flops_of_the_dense_kernel_are_those_of_the_hand_formula():
    cost = aj.plan(Q, K, V, implementation="dense").cost
    pairs = 2 * 4 * 8 * 10
    forward = pairs * (2 * 16 + 1 + 2 * 6)  # q·k, exp, weights·v
    backward = pairs * (2 * 16 + 1 + 2 * 6 + 2 * 6 + 2 * 16 + 2 * 16)  # weights again, dv, dweights, dq, dk
    assert cost.flops == forward
    assert cost.gradient_flops == forward + backward


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_peak_bytes_of_the_dense_kernel_count_whole_arrays_of_pairs(dtype):
    with jax.enable_x64(True):
        cost = aj.plan(*(shape(*x.shape, dtype=dtype) for x in (Q, K, V)), implementation="dense").cost
    size = 2 * 4 * 8 * 10 * (8 if dtype == "float64" else 4)
    assert size <= cost.peak_bytes <= cost.gradient_peak_bytes <= 6 * size


def test_the_predicted_peak_of_the_dense_kernel_is_near_what_the_compiler_needs():
    q = shape(2, 2, 256, 16)
    predicted = aj.plan(q, q, q, implementation="dense").cost
    call = jax.jit(lambda q, k, v: aj.attention(q, k, v, implementation="dense"))
    needed = temporaries(call.lower(q, q, q))
    assert needed / 3 <= predicted.peak_bytes <= 3 * needed


@kernels
def test_a_named_kernel_is_the_choice_and_every_other_has_a_reason(kernel):
    plan = aj.plan(Q, K, V, implementation=kernel)
    assert plan.implementation == kernel
    assert set(plan.refused) == set(KERNELS) - {kernel}
    assert all(plan.refused.values())


def test_auto_chooses_a_kernel_and_gives_a_reason_for_each_other():
    plan = aj.plan(Q, K, V)
    assert set(plan.refused) | {plan.implementation} == set(KERNELS)


@pytest.mark.parametrize(
    ("operands", "options", "expected"),
    [
        ((4, 8, 128), {}, ("dense", "dense")),  # logits of 2 MiB
        ((8, 8, 256), {}, ("dense", "tiled")),  # 16 MiB, 256 KiB a head
        ((8, 8, 256), {"return_lse": True}, ("tiled", "tiled")),
        ((8, 8, 256), {"dropout": (0.1, jax.random.key(0))}, ("tiled", "tiled")),
        ((9, 8, 256), {}, ("tiled", "tiled")),  # 18 MiB
        ((6, 6, 300), {}, ("tiled", "tiled")),  # 352 KiB a head
        ((8, 8, 256), {"implementation": "dense"}, ("dense", "dense")),
        ((8, 8, 256), {"return_weights": True}, ("dense", "dense")),
    ],
)
def test_what_is_differentiated_has_a_kernel_of_its_own(operands, options, expected):
    x = shape(*operands, 64)
    plan = aj.plan(x, x, x, aj.Causal(), **options)
    assert (plan.implementation, plan.differentiated) == expected
    assert ("differentiated" in str(plan)) == (expected[0] != expected[1])


def test_grouped_heads_have_no_loop_of_their_own():
    plan = aj.plan(shape(8, 8, 256, 64), *(shape(8, 2, 256, 64),) * 2)
    assert (plan.implementation, plan.differentiated) == ("tiled", "tiled")


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_the_kernel_of_a_derivative_is_the_one_that_the_plan_tells(transform, monkeypatch):
    jax.clear_caches()
    ran = []
    for name in ("dense", "tiled"):
        kernel = KERNELS[name]
        spy = lambda *given, name=name, forward=kernel.forward: ran.append(name) or forward(*given)  # noqa: E731
        monkeypatch.setattr(kernel, "forward", spy)
    x = jnp.ones((1, 9, 256, 1))  # logits of 2.25 MiB

    def total(scale):
        return aj.attention(x * scale, x, x).sum()

    aj.attention(x, x, x)
    assert ran == ["dense"]
    ran.clear()
    transform(total)(1.0)
    assert set(ran) == {"tiled"}


@kernels
def test_the_first_of_several_names_that_can_serve_is_taken(kernel):
    assert aj.plan(Q, K, V, implementation=(kernel, "dense")).implementation == kernel
    assert aj.plan(Q, K, V, implementation=("auto", kernel)).implementation == aj.plan(Q, K, V).implementation


def test_weights_are_given_by_the_dense_kernel_alone():
    assert aj.plan(Q, K, V, return_weights=True).implementation == "dense"
    for name in set(KERNELS) - {"dense"}:
        with pytest.raises(ValueError, match="dense"):
            aj.plan(Q, K, V, implementation=name, return_weights=True)


@pytest.mark.usefixtures("plain_errors")
@pytest.mark.parametrize("names", ["flash", ("flash", "dense"), ()])
@pytest.mark.parametrize("ask", [aj.plan, aj.attention])
def test_an_unknown_kernel_is_refused_with_the_known_ones(ask, names):
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"(?s)implementation.*known.*'auto'.*'dense'"):
        ask(x, x, x, implementation=names)


def test_a_plan_takes_arrays_and_shapes_and_computes_nothing(plain_errors):
    big = shape(8, 64, 65536, 128)
    assert aj.plan(big, big, big, aj.Causal()).cost.flops > 0
    x = np.ones((2, 3, 4), np.float32)
    assert str(aj.plan(x, x, x)) == str(aj.plan(*(shape(2, 3, 4),) * 3))


@pytest.mark.usefixtures("plain_errors")
def test_a_plan_refuses_what_attention_refuses():
    with pytest.raises(ValueError, match="multiple of the key/value heads"):
        aj.plan(shape(3, 8, 4), shape(2, 8, 4), shape(2, 8, 4))
    with pytest.raises(ValueError, match="q_positions"):
        aj.plan(Q, K, V, aj.Causal())


@kernels
@pytest.mark.parametrize("options", ["bias", "dropout", "scale", "positions", "lse"])
def test_a_plan_takes_every_option_of_a_call(kernel, options):
    given = {
        "bias": {"bias": jnp.zeros((8, 10))},
        "dropout": {"dropout": (0.1, jax.random.key(0))},
        "scale": {"scale": jnp.float32(0.3)},
        "positions": {"mask": aj.Causal(), "q_positions": 2, "kv_positions": jnp.arange(10)},
        "lse": {"return_lse": True},
    }[options]
    assert aj.plan(Q, K, V, **given, implementation=kernel).implementation == kernel
