"""The cells of Flax (NNX, linen) and of torch, given the same weights: same outputs, states and gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.recurrent import CELLS, LstmState, bidirectional, unroll

B, T, I, N = 3, 5, 4, 6
LENGTHS = np.array([5, 2, 3])


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.6, jnp.float32)


X = draw(0, B, T, I)


def make(name, hidden_bias=True):
    params = {key: draw(i, *shape) for i, (key, shape) in enumerate(CELLS[name].shapes(I, N).items(), 1)}
    if name == "gru" and not hidden_bias:
        params["state_bias"] = jnp.zeros_like(params["state_bias"])
    return params


def start(name):
    h, c = draw(8, B, N), draw(9, B, N)
    return LstmState(h, c) if name == "lstm" else h


def theirs(carry):
    """Flax has (c, h)."""
    return (carry.c, carry.h) if isinstance(carry, LstmState) else carry


def close(ours, truth):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5), ours, truth)


def parts(array, letters):
    return dict(zip(letters, jnp.split(array, len(letters), axis=-1), strict=True))


# ---------------------------------------------------------------- NNX


def nnx_cell(kind, params):
    cell = {
        "elman": lambda rngs: nnx.SimpleCell(I, N, rngs=rngs),
        "gru": lambda rngs: nnx.GRUCell(I, N, rngs=rngs),
        "lstm": lambda rngs: nnx.OptimizedLSTMCell(I, N, rngs=rngs),
        "lstm, plain": lambda rngs: nnx.LSTMCell(I, N, rngs=rngs),
    }[kind](nnx.Rngs(0))
    if kind == "lstm, plain":
        for key, letter in (("input", "i"), ("state", "h")):
            for gate, value in parts(params[key], "ifgo").items():
                # "if" is a word of Python
                getattr(cell, "if_" if letter + gate == "if" else letter + gate).kernel[...] = value
        for gate, value in parts(params["bias"], "ifgo").items():
            getattr(cell, "h" + gate).bias[...] = value
        return cell
    cell.dense_i.kernel[...], cell.dense_h.kernel[...] = params["input"], params["state"]
    (cell.dense_h if kind == "lstm" else cell.dense_i).bias[...] = params["bias"]
    return cell


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("kind", ["elman", "gru", "lstm", "lstm, plain"])
def test_flax_nnx_gives_the_same(kind, reverse):
    name = kind.split(",")[0]
    params, carry = make(name, hidden_bias=False), start(name)
    rnn = nnx.RNN(nnx_cell(kind, params), reverse=reverse, keep_order=True, return_carry=True)
    last, outputs = rnn(X, initial_carry=theirs(carry), seq_lengths=jnp.asarray(LENGTHS))
    ours = unroll(CELLS[name], params, X, carry, lengths=LENGTHS, reverse=reverse)
    on = np.arange(T)[None, :, None] < LENGTHS[:, None, None]
    close((theirs(ours[0]), ours[1]), (last, jnp.where(on, outputs, jnp.zeros_like(outputs))))


# ---------------------------------------------------------------- linen


def linen_params(kind, params):
    kernels = lambda array, letters, side: {side + g: {"kernel": v} for g, v in parts(array, letters).items()}  # noqa: E731
    if kind == "elman":
        return {"i": {"kernel": params["input"], "bias": params["bias"]}, "h": {"kernel": params["state"]}}
    letters = "rzn" if kind == "gru" else "ifgo"
    tree = kernels(params["input"], letters, "i") | kernels(params["state"], letters, "h")
    for gate, value in parts(params["bias"], letters).items():
        tree[("i" if kind == "gru" else "h") + gate]["bias"] = value
    if kind == "gru":
        tree["hn"]["bias"] = params["state_bias"]
    return tree


LINEN = {"elman": nn.SimpleCell, "gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell, "lstm, plain": nn.LSTMCell}


@pytest.mark.parametrize("kind", LINEN)
def test_flax_linen_gives_the_same_and_the_same_gradients(kind):
    name = kind.split(",")[0]
    params, carry = make(name), start(name)
    rnn = nn.RNN(LINEN[kind](N), return_carry=True)

    def flax(params, x, carry):
        variables = {"params": {"cell": linen_params(name, params)}}
        last, outputs = rnn.apply(variables, x, initial_carry=theirs(carry), seq_lengths=jnp.asarray(LENGTHS))
        on = np.arange(T)[None, :, None] < LENGTHS[:, None, None]
        return last, jnp.where(on, outputs, jnp.zeros_like(outputs))

    def ours(params, x, carry):
        last, outputs = unroll(CELLS[name], params, x, carry, lengths=LENGTHS)
        return theirs(last), outputs

    def gradients(run):
        loss = lambda *primals: sum(jnp.sum(jnp.sin(3 * leaf)) for leaf in jax.tree.leaves(run(*primals)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(params, X, carry)

    close(ours(params, X, carry), flax(params, X, carry))
    close(gradients(ours), gradients(flax))


# ---------------------------------------------------------------- torch


def fill(torch, rnn, name, params, suffix=""):
    """Writes our parameters into torch's, whose two biases per gate add up except in a GRU's candidate."""
    hidden = np.zeros(len(params["bias"]), np.float32)
    if name == "gru":
        hidden[2 * N :] = params["state_bias"]
    values = {"weight_ih": params["input"].T, "weight_hh": params["state"].T, "bias_ih": params["bias"]}
    for key, value in {**values, "bias_hh": hidden}.items():
        getattr(rnn, f"{key}_l0{suffix}").data = torch.tensor(np.array(value))


def to_torch(torch, carry):
    return jax.tree.map(lambda leaf: torch.tensor(np.array(leaf))[None], carry)


@pytest.mark.parametrize("name", ["elman", "gru", "lstm"])
def test_torch_gives_the_same_and_the_same_gradients(name):
    torch = pytest.importorskip("torch")
    params, carry = make(name), start(name)
    rnn = {"elman": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[name](I, N, batch_first=True)
    fill(torch, rnn, name, params)
    x = torch.tensor(np.array(X), requires_grad=True)
    before = to_torch(torch, carry)
    outputs, last = rnn(x, tuple(before) if name == "lstm" else before)
    torch.sin(3 * outputs).sum().backward()
    ours = unroll(CELLS[name], params, X, carry)
    to_numpy = lambda leaf: leaf.detach().numpy()  # noqa: E731
    close(ours[1], to_numpy(outputs))
    finals = [to_numpy(leaf)[0] for leaf in (last if name == "lstm" else [last])]
    close(jax.tree.leaves(ours[0]), finals)
    loss = lambda params, x: jnp.sum(jnp.sin(3 * unroll(CELLS[name], params, x, carry)[1]))  # noqa: E731
    slope, x_slope = jax.grad(loss, (0, 1))(params, X)
    close(x_slope, x.grad.numpy())
    close(slope["input"].T, rnn.weight_ih_l0.grad.numpy())
    close(slope["state"].T, rnn.weight_hh_l0.grad.numpy())
    close(slope["bias"], rnn.bias_ih_l0.grad.numpy())
    if name == "gru":
        close(slope["state_bias"], rnn.bias_hh_l0.grad.numpy()[2 * N :])


def test_torch_gives_the_same_in_both_directions_with_lengths():
    torch = pytest.importorskip("torch")
    ahead, behind = make("gru"), jax.tree.map(jnp.cos, make("gru"))
    rnn = torch.nn.GRU(I, N, batch_first=True, bidirectional=True)
    fill(torch, rnn, "gru", ahead)
    fill(torch, rnn, "gru", behind, "_reverse")
    pack = torch.nn.utils.rnn.pack_padded_sequence
    packed = pack(torch.tensor(np.array(X)), torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        outputs, last = rnn(packed)
        outputs, _ = torch.nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
    ours = bidirectional(CELLS["gru"], (ahead, behind), X, lengths=LENGTHS)
    close(ours, (tuple(last.numpy()), outputs.numpy()))
