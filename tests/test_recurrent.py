"""Cells and their unrolling against NumPy float64, and everything that `unroll` promises."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recurrent_oracle

from attention_jax import recurrent
from attention_jax.recurrent import CELLS, GRU, LINEAR, LstmState, bidirectional, unroll, unroll_associative

cells = pytest.mark.parametrize("name", CELLS)
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
# the linear cell twice: one time after the other, and all at once
ways = pytest.mark.parametrize("way", [*CELLS, "associative"])

B, T, I, N = 3, 5, 4, 3
LENGTHS = np.array([5, 3, 0])


def runner(way):
    """(the cell's name, unroll of it)."""
    if way == "associative":
        return "linear", unroll_associative
    return way, functools.partial(unroll, CELLS[way])


def make(name, dtype=jnp.float32, batch=(B,), time=T):
    """(params, x, carry), all of them nowhere zero."""
    rng = np.random.default_rng(7)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.7, dtype)  # noqa: E731
    params = {key: draw(*shape) for key, shape in CELLS[name].shapes(I, N).items()}
    x, h, c = draw(*batch, time, I), draw(*batch, N), draw(*batch, N)
    return params, x, LstmState(h, c) if name == "lstm" else h


def close(ours, truth, tolerance=2e-6):
    leaves = zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True)
    for one, other in leaves:
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def plain(name, params, carry, x, lengths=None, reverse=False):
    """Steps in a Python loop, for derivatives by ordinary autodiff: what a loop must equal."""
    outputs = [None] * x.shape[-2]
    for t in reversed(range(x.shape[-2])) if reverse else range(x.shape[-2]):
        new, output = CELLS[name].step(params, carry, x[..., t, :])
        if lengths is not None:
            on = (t < lengths)[..., None]
            new = jax.tree.map(lambda one, old, on=on: jnp.where(on, one, old), new, carry)
            output = jnp.where(on, output, jnp.zeros_like(output))
        carry, outputs[t] = new, output
    return carry, jnp.stack(outputs, axis=-2)


def loss(result):
    return sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(result))


@directions
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "lengths"])
@ways
def test_unrolling_equals_numpy_row_by_row_and_step_by_step(way, lengths, reverse):
    name, run = runner(way)
    params, x, carry = make(name)
    last, outputs = run(params, x, carry, lengths=lengths, reverse=reverse)
    before = np.stack(carry) if name == "lstm" else np.asarray(carry)
    truth = recurrent_oracle.unroll(name, params, np.asarray(x), before, lengths, reverse)
    close((jnp.stack(last) if name == "lstm" else last, outputs), truth)


@pytest.mark.parametrize(
    ("derivative", "reverse"),
    [
        ("gradient", False),
        ("gradient", True),
        ("jvp", False),
        ("forward over reverse", True),
        ("reverse over reverse", False),
    ],
)
@ways
def test_every_derivative_equals_that_of_the_steps_in_a_row(way, derivative, reverse):
    name, run = runner(way)
    params, x, carry = make(name)
    lengths = jnp.asarray(LENGTHS)
    ours = lambda *primals: run(*primals, lengths=lengths, reverse=reverse)  # noqa: E731
    theirs = lambda params, x, carry: plain(name, params, carry, x, lengths, reverse)  # noqa: E731

    def derived(fn):
        gradient = jax.grad(lambda *primals: loss(fn(*primals)), argnums=(0, 1, 2))
        tangents = jax.tree.map(jnp.cos, (params, x, carry))
        return {
            "gradient": gradient,
            "jvp": lambda *primals: jax.jvp(fn, primals, tangents)[1],
            "forward over reverse": lambda *primals: jax.jvp(gradient, primals, tangents)[1],
            "reverse over reverse": jax.grad(lambda *primals: loss(gradient(*primals)), argnums=(0, 1, 2)),
        }[derivative]

    second = "over" in derivative
    close(derived(ours)(params, x, carry), jax.jit(derived(theirs))(params, x, carry), 2e-3 if second else 2e-5)


@directions
@ways
def test_what_the_pad_holds_reaches_neither_outputs_nor_state_nor_gradients(way, reverse):
    name, run = runner(way)
    params, x, carry = make(name)
    pad = np.arange(T)[None, :, None] >= LENGTHS[:, None, None]

    def all_of_it(x, cotangent):
        result, pull = jax.vjp(lambda *primals: run(*primals, lengths=LENGTHS, reverse=reverse), params, x, carry)
        return result, pull((jax.tree.map(jnp.cos, result[0]), cotangent))

    clean = all_of_it(jnp.where(pad, jnp.zeros_like(x), x), jnp.where(pad, 0.0, jnp.ones((B, T, N))))
    junk = all_of_it(jnp.where(pad, jnp.full_like(x, jnp.nan), x), jnp.where(pad, jnp.inf, jnp.ones((B, T, N))))
    jax.tree.map(np.testing.assert_array_equal, junk, clean)
    (last, outputs), (_, x_gradient, _) = junk
    assert not np.any(np.where(pad, outputs, 0))
    assert not np.any(np.where(pad, x_gradient, 0))
    jax.tree.map(lambda one, start: np.testing.assert_array_equal(one[2], start[2]), last, carry)  # length 0


@directions
@ways
def test_a_sequence_can_be_cut_and_resumed_anywhere(way, reverse):
    name, run = runner(way)
    params, x, carry = make(name)
    whole = run(params, x, carry, reverse=reverse)
    for cut in (0, 1, 4, T):
        early, late = x[:, :cut], x[:, cut:]
        middle, first = run(params, late if reverse else early, carry, reverse=reverse)
        last, second = run(params, early if reverse else late, middle, reverse=reverse)
        outputs = (second, first) if reverse else (first, second)
        close((last, jnp.concatenate(outputs, axis=1)), whole)


@ways
def test_no_carry_is_a_carry_of_zeros(way):
    name, run = runner(way)
    params, x, carry = make(name)
    jax.tree.map(np.testing.assert_array_equal, run(params, x), run(params, x, jax.tree.map(jnp.zeros_like, carry)))


@directions
@ways
def test_any_batch_axes_and_none(way, reverse):
    name, run = runner(way)
    params, x, carry = make(name, batch=(2, 3))
    lengths = jnp.array([[5, 3, 0], [1, 4, 2]])
    whole = run(params, x, carry, lengths=lengths, reverse=reverse)
    for row in np.ndindex(2, 3):
        at = operator.itemgetter(row)
        one = run(params, x[row], jax.tree.map(at, carry), lengths=lengths[row], reverse=reverse)
        close(one, jax.tree.map(at, whole))


@ways
def test_one_length_serves_all_rows(way):
    name, run = runner(way)
    params, x, carry = make(name)
    for length in (4, np.int64(4), jnp.uint8(4)):
        rows = run(params, x, carry, lengths=np.full(B, 4))
        jax.tree.map(np.testing.assert_array_equal, run(params, x, carry, lengths=length), rows)


@ways
def test_a_traced_length_beyond_the_sequence_means_all_of_it(way):
    name, run = runner(way)
    params, x, carry = make(name)
    close(run(params, x, carry, lengths=jnp.full(B, 99)), run(params, x, carry))


@directions
@ways
def test_no_steps_and_no_rows_and_one_step(way, reverse):
    name, run = runner(way)
    params, x, carry = make(name)
    last, outputs = run(params, x[:, :0], carry, reverse=reverse, lengths=np.zeros(B, int))
    assert outputs.shape == (B, 0, N)
    jax.tree.map(np.testing.assert_array_equal, last, carry)
    gradients = jax.grad(lambda params, carry: loss(run(params, x[:, :0], carry)), argnums=(0, 1))(params, carry)
    assert not any(np.any(leaf) for leaf in gradients[0].values())
    last, outputs = run(params, x[:0], reverse=reverse)
    assert outputs.shape == (0, T, N)
    last, outputs = run(params, x[:, :1], carry, reverse=reverse)
    close(outputs[:, 0], CELLS[name].output(last))


@cells
def test_bidirectional_is_two_unrolls_side_by_side(name):
    params, x, carry = make(name)
    other, *_ = make(name)
    other = jax.tree.map(jnp.sin, other)
    (ahead, behind), outputs = bidirectional(CELLS[name], (params, other), x, (carry, carry), lengths=LENGTHS)
    forward = unroll(CELLS[name], params, x, carry, lengths=LENGTHS)
    backward = unroll(CELLS[name], other, x, carry, lengths=LENGTHS, reverse=True)
    jax.tree.map(np.testing.assert_array_equal, (ahead, outputs[..., :N]), forward)
    jax.tree.map(np.testing.assert_array_equal, (behind, outputs[..., N:]), backward)


@pytest.mark.parametrize(
    ("params_dtype", "x_dtype"),
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
        ("float32", "float64"),
        ("float64", "float16"),
    ],
)
@pytest.mark.parametrize("way", ["gru", "lstm", "associative"])
def test_the_carry_is_at_least_float32_and_outputs_have_the_dtype_of_x(way, params_dtype, x_dtype):
    name, run = runner(way)
    with jax.enable_x64(True):
        params, x, carry = make(name, jnp.float64)
        params = jax.tree.map(lambda leaf: leaf.astype(params_dtype), params)
        x, carry = x.astype(x_dtype), jax.tree.map(lambda leaf: leaf.astype(x_dtype), carry)
        last, outputs = run(params, x, carry, lengths=LENGTHS)
        again, _ = run(params, x, last, lengths=LENGTHS)
        wide = "float64" if "float64" in (params_dtype, x_dtype) else "float32"
        assert {leaf.dtype.name for leaf in jax.tree.leaves((last, again))} == {wide}
        assert outputs.dtype == x_dtype
        before = np.stack(carry) if name == "lstm" else np.asarray(carry)
        _, truth = recurrent_oracle.unroll(name, params, np.asarray(x), before, LENGTHS)
        tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-12}
        close(outputs.astype(jnp.float64), truth, max(tolerance[x_dtype], tolerance[wide]))
        gradients = jax.grad(lambda *primals: loss(run(*primals)[0]), argnums=(0, 1, 2))(params, x, carry)
        dtypes = lambda tree: [leaf.dtype for leaf in jax.tree.leaves(tree)]  # noqa: E731
        assert dtypes(gradients) == dtypes((params, x, carry))


def test_a_half_precision_sequence_does_not_lose_its_state_to_rounding():
    params = {"input": jnp.zeros((1, 2), jnp.bfloat16), "bias": jnp.array([8.0, 1.0], jnp.bfloat16)}
    last, _ = unroll(LINEAR, params, jnp.zeros((1000, 1), jnp.bfloat16))
    np.testing.assert_allclose(last, 1 - jax.nn.sigmoid(8.0) ** 1000, rtol=1e-4)


@ways
def test_numpy_arrays_of_any_stride_are_taken(way):
    name, run = runner(way)
    params, x, carry = make(name)
    strided = np.asarray(x)[::-1, ::2].astype(np.float32)[..., ::-1]
    params = jax.tree.map(np.asarray, params)
    ours = run(params, strided, jax.tree.map(np.asarray, carry), lengths=np.array([3, 2, 0])[::-1])
    close(ours, run(params, jnp.asarray(strided), carry, lengths=jnp.array([0, 2, 3])))


@cells
def test_drawn_parameters_are_reproducible_and_scaled(name):
    params = CELLS[name].init(jax.random.key(0), 6, 8, jnp.bfloat16)
    assert {leaf.dtype.name for leaf in params.values()} == {"bfloat16"}
    assert {key: leaf.shape for key, leaf in params.items()} == CELLS[name].shapes(6, 8)
    jax.tree.map(np.testing.assert_array_equal, params, CELLS[name].init(jax.random.key(0), 6, 8, jnp.bfloat16))
    params = CELLS[name].init(jax.random.key(0), 400, 8)
    assert abs(float(jnp.std(params["input"])) * 20 - 1) < 0.1
    for square in jnp.split(params.get("state", jnp.eye(8)), CELLS[name].gates if "state" in params else 1, axis=1):
        close(square.T @ square, jnp.eye(8), 1e-5)


def test_cells_are_values():
    assert CELLS["gru"] == GRU
    assert hash(GRU) == hash(type(GRU)())
    assert len({*CELLS.values()}) == 4
    with pytest.raises(AttributeError):
        GRU.gates = 2


def test_the_module_names_everything():
    assert recurrent.CELLS["lstm"] is recurrent.LSTM
    assert recurrent.CELLS["elman"] is recurrent.ELMAN
