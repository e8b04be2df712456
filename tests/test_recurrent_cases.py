"""Recurrent networks that went wrong elsewhere, with the right answers; each test names the public reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import exact

from attention_jax.recurrent import CELLS, ELMAN, GRU, LSTM, LstmState, bidirectional, unroll

TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 0.04, "float16": 0.006}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def elman(dtype, seeds=(2101, 2102, 2103)):
    shapes = {"input": (2, 2), "state": (2, 2), "bias": (2,)}
    drawn = zip(shapes.items(), seeds, strict=True)
    return {name: jnp.asarray(exact(seed, *shape) * 0.5, dtype) for (name, shape), seed in drawn}


def gru(dtype):
    params = {
        "input": np.concatenate([exact(seed, 2, 2) * 0.5 for seed in (2110, 2111, 2112)], axis=1),
        "state": np.concatenate([exact(seed, 2, 2) * 0.5 for seed in (2113, 2114, 2115)], axis=1),
        "bias": np.concatenate([exact(seed, 2) for seed in (2120, 2121, 2122)]),
        "state_bias": exact(2123, 2),
    }
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


def lstm(dtype):
    params = {
        "input": np.concatenate([exact(seed, 2, 2) * 0.5 for seed in range(2130, 2134)], axis=1),
        "state": np.concatenate([exact(seed, 2, 2) * 0.5 for seed in range(2134, 2138)], axis=1),
        "bias": np.concatenate([exact(seed, 2) for seed in (2140, 2141, 2142, 2143)]),
    }
    return {name: jnp.asarray(value, dtype) for name, value in params.items()}


def inputs(dtype, seed, *shape):
    return jnp.asarray(exact(seed, *shape), dtype)


def close(ours, truth, dtype):
    np.testing.assert_allclose(np.asarray(ours, np.float64), truth, rtol=0, atol=TOLERANCE[dtype])


@dtypes
def test_rn01_a_reversed_row_starts_at_its_own_end(dtype):
    """pytorch#1811, pytorch#517, keras#7244, dynet#1121."""
    x = inputs(dtype, 2151, 2, 4, 2)
    last, outputs = unroll(ELMAN, elman(dtype), x, lengths=np.array([4, 2]), reverse=True)
    truth = [
        [
            [0.384896600149, 0.784491691302],
            [0.197708790334, 0.856076514069],
            [0.00742223737039, 0.87758145874],
            [-0.303596543867, 0.767276471954],
        ],
        [[-0.179718214917, 0.889817195166], [-0.371057109243, 0.57651474151], [0, 0], [0, 0]],
    ]
    close(outputs, truth, dtype)
    close(last, [[0.384896600149, 0.784491691302], [-0.179718214917, 0.889817195166]], dtype)


@dtypes
def test_rn03_the_hidden_bias_of_a_gru_is_inside_its_reset_gate(dtype):
    """flax#5594, equinox#1003, burn#2701, pytorch#529."""
    last, outputs = unroll(GRU, gru(dtype), inputs(dtype, 2171, 1, 3, 2), inputs(dtype, 2172, 1, 2))
    truth = [
        [-0.983391984178, -0.231982092371],
        [-0.962425506309, -0.197871652464],
        [-0.960288086203, -0.24018840594],
    ]
    close(outputs, [truth], dtype)
    close(last, [truth[-1]], dtype)


@dtypes
def test_rn04_each_step_starts_from_the_state_before_it(dtype):
    """burn#2701."""
    last, outputs = unroll(GRU, gru(dtype), inputs(dtype, 2181, 1, 4, 2))
    truth = [
        [-0.1620570348, 0.0406234611673],
        [-0.233829683696, -0.0154723747103],
        [-0.0929788645603, 0.113150994747],
        [-0.0426183229265, 0.146583270698],
    ]
    close(outputs, [truth], dtype)
    close(last, [truth[-1]], dtype)


@dtypes
def test_rn05_the_gates_of_an_lstm_are_in_the_order_i_f_g_o(dtype):
    """flax#3746."""
    carry = LstmState(h=inputs(dtype, 2192, 1, 2), c=inputs(dtype, 2193, 1, 2))
    last, outputs = unroll(LSTM, lstm(dtype), inputs(dtype, 2191, 1, 3, 2), carry)
    truth = [
        [-0.0919804466375, 0.250138637782],
        [-0.123513956451, 0.229666078885],
        [-0.134158804418, 0.290070109327],
    ]
    close(outputs, [truth], dtype)
    close(last.h, [truth[-1]], dtype)
    close(last.c, [[-0.545802326873, 0.716024333278]], dtype)


@dtypes
def test_rn07_each_row_ends_for_itself(dtype):
    """keras#1258."""
    last, outputs = unroll(ELMAN, elman(dtype), inputs(dtype, 2211, 3, 3, 2), lengths=np.array([1, 3, 2]))
    truth = [
        [[-0.372740099557, 0.874191516404], [0, 0], [0, 0]],
        [[-0.352384794007, 0.856427663347], [0.0906209952976, 0.979791284456], [0.451455783271, 0.861942415361]],
        [[-0.426863224225, 0.646656797959], [-0.220798923639, 0.960864677561], [0, 0]],
    ]
    close(outputs, truth, dtype)
    close(last, [truth[0][0], truth[1][2], truth[2][1]], dtype)
    assert not outputs[0, 1:].any()
    assert not outputs[2, 2:].any()


@dtypes
def test_rn08_both_halves_of_a_bidirectional_output_stand_at_their_token(dtype):
    """flax#2770, pytorch#3662, keras#3367."""
    params = elman(dtype), elman(dtype, (2222, 2223, 2224))
    last, outputs = bidirectional(ELMAN, params, inputs(dtype, 2221, 1, 4, 2), lengths=np.array([3]))
    truth = [
        [-0.260004544863, 0.553245876433, 0.322833066841, -0.304830971073],
        [0.0253870547512, 0.894930514789, -0.048832074428, -0.433014648311],
        [0.283937802407, 0.88946543147, -0.590998557095, 0.0910556826767],
        [0, 0, 0, 0],
    ]
    close(outputs, [truth], dtype)
    close(np.concatenate(last, axis=1), [[0.283937802407, 0.88946543147, 0.322833066841, -0.304830971073]], dtype)


@pytest.mark.parametrize(
    ("name", "reverse", "dtype"),
    [(name, False, "float32") for name in CELLS] + [("gru", True, dtype) for dtype in TOLERANCE],
)
def test_rn09_a_pad_of_nan_reaches_nothing(name, reverse, dtype):
    """flax#2604, jax#15169."""
    lengths = np.array([4, 2])
    x = np.where((np.arange(4)[None, :] < lengths[:, None])[..., None], exact(2231, 2, 4, 2), np.nan)
    params = {
        key: jnp.asarray(exact(2240 + i, *shape) * 0.5, dtype)
        for i, (key, shape) in enumerate(CELLS[name].shapes(2, 2).items())
    }

    def loss(params, x, lengths=None):
        last, outputs = unroll(CELLS[name], params, x, lengths=lengths, reverse=reverse)
        return sum(leaf.astype(jnp.float64).sum() for leaf in jax.tree.leaves((last, outputs)))

    value, (slope, x_slope) = jax.value_and_grad(loss, (0, 1))(params, jnp.asarray(x, dtype), lengths)
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in (value, x_slope, *slope.values()))
    assert not x_slope[1, 2:].any()
    rows = [jnp.asarray(x[row, : lengths[row]], dtype) for row in (0, 1)]
    trimmed = [jax.value_and_grad(loss, (0, 1))(params, row) for row in rows]
    close(value, sum(float(one) for one, _ in trimmed), dtype)
    for row, (_, (_, row_slope)) in enumerate(trimmed):
        close(x_slope[row, : lengths[row]], np.asarray(row_slope, np.float64), dtype)
    for key in params:
        # both the sum over rows and the two halves of it are rounded to the parameters' dtype
        truth = sum(np.asarray(one[key], np.float64) for _, (one, _) in trimmed)
        np.testing.assert_allclose(
            np.asarray(slope[key], np.float64), truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
