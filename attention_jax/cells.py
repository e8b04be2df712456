"""Recurrent cells: what one step does, as pure functions of parameters.

A step is taken apart so that the unrolled loop can do as much as possible for all times at once:

    inner = cell.project(params, x)          what the input adds: no state in it, one product for all times
    recurrent = cell.recur(params, carry)    what the state adds: one product per step, linear in the parameters
    carry = cell.combine(carry, inner, recurrent)         elementwise, no parameters

A new cell is one class here and one entry in `CELLS`.
"""

import abc
import dataclasses
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from .errors import explain

Params = dict[str, Any]


class LstmState(NamedTuple):
    """The carry of an LSTM: its output `h (..., N)` and its memory `c (..., N)`."""

    h: Any
    c: Any


@dataclasses.dataclass(frozen=True)
class Cell(abc.ABC):
    """A recurrent cell: names no sizes and owns no parameters. N is the width of its state, I that of its inputs.

    Attributes:
        name: its key in `CELLS`.
        gates: how many times N its input projection is wide.
    """

    name: str
    gates: int

    @abc.abstractmethod
    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes for inputs of width I and a state of width N."""

    @abc.abstractmethod
    def recur(self, params: Params, carry: PyTree) -> PyTree:
        """What the state adds to the gates, before any nonlinearity; linear in the parameters."""

    @abc.abstractmethod
    def combine(self, carry: PyTree, inner: Float[Array, "*B G"], recurrent: PyTree) -> PyTree:
        """The next carry, elementwise."""

    def init(self, key: Key[Array, ""], inputs: int, state: int, dtype: Any = jnp.float32) -> Params:
        """Draws parameters: inputs LeCun-normal, each gate's recurrent matrix orthogonal, biases as the cell says.

        Args:
            key: a random key; the same key gives the same parameters.
            inputs: width I of the inputs.
            state: width N of the state.
            dtype: of the parameters.

        Raises:
            ValueError: a width below 1.
            TypeError: a dtype that is not floating.

        Example:
            >>> params = GRU.init(jax.random.key(0), inputs=3, state=4)
            >>> {name: value.shape for name, value in params.items()}
            {'input': (3, 12), 'state': (4, 12), 'bias': (12,), 'state_bias': (4,)}
        """
        if min(inputs, state) < 1:
            raise ValueError(explain("init", "widths are at least 1.", {"inputs I": inputs, "state N": state}))
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(explain("init", "parameters are floats.", {"dtype": dtype}))
        input_key, state_key, bias_key = jax.random.split(key, 3)
        shapes = self.shapes(inputs, state)
        # float32 at least: the orthogonal matrices come from a QR that half precision does not have
        drawn = jnp.promote_types(dtype, jnp.float32)
        params = {"input": jax.nn.initializers.lecun_normal()(input_key, shapes["input"], drawn)}
        if "state" in shapes:
            orthogonal = jax.nn.initializers.orthogonal()
            keys = jax.random.split(state_key, shapes["state"][1] // state)
            params["state"] = jnp.concatenate([orthogonal(one, (state, state), drawn) for one in keys], axis=1)
        params["bias"] = self.init_bias(bias_key, state, drawn)
        if "state_bias" in shapes:
            params["state_bias"] = jnp.zeros(shapes["state_bias"], drawn)
        return {name: value.astype(dtype) for name, value in params.items()}

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        """Zeros, unless the cell knows better."""
        return jnp.zeros(self.gates * state, dtype)

    def project(self, params: Params, x: Float[Array, "*B I"]) -> Float[Array, "*B G"]:
        """What the inputs add to the gates, for any number of times at once."""
        return product(x, params["input"]) + _spread(params["bias"], x)

    def step(self, params: Params, carry: PyTree, x: Float[Array, "*B I"]) -> tuple[PyTree, Float[Array, "*B N"]]:
        """One step: (the next carry, the output), from the carry and one input. `unroll` says what it does."""
        carry = self.combine(carry, self.project(params, x), self.recur(params, carry))
        return carry, self.output(carry)

    def output(self, carry: PyTree) -> Float[Array, "*B N"]:
        """What others see of a carry: h."""
        return carry

    def state_width(self, params: Params) -> int:
        """N, read off the parameters."""
        return params["bias"].shape[0] // self.gates

    def carry_like(self, h: Float[Array, "*B N"]) -> PyTree:
        """A carry whose every array is h: for zeros, and to compare shapes with."""
        return h


@final
@dataclasses.dataclass(frozen=True)
class Elman(Cell):
    """h' = tanh(x W + h U + b).

    Parameters: `input` W (I, N), `state` U (N, N), `bias` b (N,). Flax's `SimpleCell`; torch's `RNN` has two biases,
    of which b is the sum.

    References:
        Elman, Finding structure in time, 1990.
    """

    name: str = "elman"
    gates: int = 1

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        return {"input": (inputs, state), "state": (state, state), "bias": (state,)}

    def recur(self, params: Params, carry: PyTree) -> PyTree:
        """See `Cell`."""
        return product(carry, params["state"])

    def combine(self, carry: PyTree, inner: Float[Array, "*B G"], recurrent: PyTree) -> PyTree:
        """See `Cell`."""
        return jnp.tanh(inner + recurrent)


@final
@dataclasses.dataclass(frozen=True)
class Gru(Cell):
    """Gated recurrent unit, with the reset gate after the product and the hidden bias inside it, as cuDNN has it.

    r, z = σ(x W + h U + b);  n = tanh(x Wₙ + bₙ + r (h Uₙ + c));  h' = (1 - z) n + z h.

    Parameters: `input` (I, 3N), `state` (N, 3N), `bias` (3N,) for r, z, n in this order, and `state_bias` c (N,).
    Flax's NNX cell has no c, its linen cell has; torch has two biases per gate, of which those of r and z add up.

    References:
        Cho et al., Learning phrase representations using RNN encoder-decoder, 2014.
    """

    name: str = "gru"
    gates: int = 3

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        wide = 3 * state
        return {"input": (inputs, wide), "state": (state, wide), "bias": (wide,), "state_bias": (state,)}

    def recur(self, params: Params, carry: PyTree) -> PyTree:
        """See `Cell`."""
        gates, candidate = _split(product(carry, params["state"]), 2, 1)
        return gates, candidate + _spread(params["state_bias"], candidate)

    def combine(self, carry: PyTree, inner: Float[Array, "*B G"], recurrent: PyTree) -> PyTree:
        """See `Cell`."""
        gates, candidate = _split(inner, 2, 1)
        reset, keep = _split(jax.nn.sigmoid(gates + recurrent[0]), 1, 1)
        new = jnp.tanh(candidate + reset * recurrent[1])
        return new + keep * (carry - new)


@final
@dataclasses.dataclass(frozen=True)
class Lstm(Cell):
    """Long short-term memory: i, f, o = σ(x W + h U + b); g = tanh(x W + h U + b); c' = f c + i g; h' = o tanh(c').

    Parameters: `input` (I, 4N), `state` (N, 4N), `bias` (4N,) for i, f, g, o in this order; `init` gives f a bias
    of 1. Carry: `LstmState(h, c)`. Torch has two biases, of which ours is the sum.

    References:
        Hochreiter and Schmidhuber, Long short-term memory, 1997. Jozefowicz et al., An empirical exploration of
        recurrent network architectures, 2015, for the bias of 1.
    """

    name: str = "lstm"
    gates: int = 4

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        return {"input": (inputs, 4 * state), "state": (state, 4 * state), "bias": (4 * state,)}

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        """See `Cell`."""
        return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), state)

    def recur(self, params: Params, carry: PyTree) -> PyTree:
        """See `Cell`."""
        return product(carry.h, params["state"])

    def combine(self, carry: PyTree, inner: Float[Array, "*B G"], recurrent: PyTree) -> PyTree:
        """See `Cell`."""
        add, keep, new, show = _split(inner + recurrent, 1, 1, 1, 1)
        c = jax.nn.sigmoid(keep) * carry.c + jax.nn.sigmoid(add) * jnp.tanh(new)
        return LstmState(jax.nn.sigmoid(show) * jnp.tanh(c), c)

    def output(self, carry: PyTree) -> Float[Array, "*B N"]:
        """See `Cell`."""
        return carry.h

    def carry_like(self, h: Float[Array, "*B N"]) -> PyTree:
        """See `Cell`."""
        return LstmState(h, h)


@final
@dataclasses.dataclass(frozen=True)
class Linear(Cell):
    """A gated linear recurrence: a = σ(x Wₐ + bₐ); h' = a h + (1 - a) (x W + b).

    The gate sees the input only, so a step is linear in h and all times can be computed at once
    (`unroll_associative`). Parameters: `input` (I, 2N) and `bias` (2N,) for a and the new value in this order; `init`
    spreads the gates' time constants from 1 to 100 steps.

    References:
        Martin and Cundy, Parallelizing linear recurrent neural nets over sequence length, 2018. Feng et al., Were RNNs
        all we needed?, 2024.
    """

    name: str = "linear"
    gates: int = 2

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        return {"input": (inputs, 2 * state), "bias": (2 * state,)}

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        """See `Cell`."""
        # σ(log s) = s / (s + 1) forgets at a rate of one in s + 1 steps
        spread = jax.random.uniform(key, (state,), dtype, maxval=jnp.log(jnp.array(100, dtype)))
        return jnp.concatenate([spread, jnp.zeros_like(spread)])

    def recur(self, params: Params, carry: PyTree) -> PyTree:
        """See `Cell`."""
        return ()

    def affine(self, inner: Float[Array, "*B G"]) -> tuple[Float[Array, "*B N"], Float[Array, "*B N"]]:
        """(a, b) of h' = a h + b."""
        gate, new = _split(inner, 1, 1)
        return jax.nn.sigmoid(gate), jax.nn.sigmoid(-gate) * new

    def combine(self, carry: PyTree, inner: Float[Array, "*B G"], recurrent: PyTree) -> PyTree:
        """See `Cell`."""
        a, b = self.affine(inner)
        return a * carry + b


def product(x: Float[Array, "*B I"], weights: Float[Array, "I G"]) -> Float[Array, "*B G"]:
    """x W over the last axis; in full precision unless the caller's matmul precision says otherwise."""
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return lax.dot_general(
        x,
        weights,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=None if chosen else lax.Precision.HIGHEST,
    )


def _split(x: Float[Array, "*B G"], *parts: int) -> list[Array]:
    """Cuts the last axis into parts of these relative widths."""
    unit = x.shape[-1] // sum(parts)
    return lax.split(x, [part * unit for part in parts], axis=x.ndim - 1)


def _spread(bias: Float[Array, "G"], x: Array) -> Array:
    """A bias with leading axes of 1, as strict rank promotion wants it."""
    return bias.reshape((1,) * (x.ndim - 1) + bias.shape)


ELMAN = Elman()
GRU = Gru()
LSTM = Lstm()
LINEAR = Linear()
CELLS: dict[str, Cell] = {cell.name: cell for cell in (ELMAN, GRU, LSTM, LINEAR)}
