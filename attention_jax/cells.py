"""Recurrent cells: what one step does, as pure functions of parameters.

A step is taken apart, so that an unrolled loop can do as much as possible for all times at once:

    inner = cell.project(params, x)              what the input adds: one product for all times
    inside = cell.recur(params, carry)           what state and biases add, affine in both: one product per step
    carry = cell.combine(carry, cell.join(inner, inside))         elementwise, no parameters

Everything between `project` and `combine` is a tuple with one array per gate: XLA does not vectorise on CPU what it
cuts out of one wide array inside a loop (the difference is a factor of two at N = 128).

A new cell is one class here and one entry in `CELLS`.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from .errors import explain

Params = dict[str, Any]
Gates = tuple[Float[Array, "*B N"], ...]


class LstmState(NamedTuple):
    """The carry of an LSTM: its output `h (..., N)` and its memory `c (..., N)`."""

    h: Any
    c: Any


@dataclasses.dataclass(frozen=True)
class Cell(abc.ABC):
    """A recurrent cell: holds no sizes and no parameters. N is the width of its state, I that of its inputs.

    Attributes:
        name: its key in `CELLS`.
        gates: how many matrices (I, N) its input goes through.
    """

    name: str
    gates: int

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        """The parameters' names and shapes for inputs of width I and a state of width N."""
        wide = self.gates * state
        return {"input": (inputs, wide), "state": (state, wide), "bias": (wide,)}

    def recur(self, params: Params, carry: PyTree) -> Gates:
        """What the state and the biases add to each gate; affine in the carry, affine in the parameters."""
        products = gate_products(self.output(carry), params["state"], self.gates)
        return jax.tree.map(jnp.add, products, self.biases(params, products[0].ndim))

    def join(self, inner: Gates, inside: Gates) -> Gates:
        """What goes into the nonlinearities, from both sides; linear."""
        return jax.tree.map(jnp.add, inner, inside)

    @abc.abstractmethod
    def combine(self, carry: PyTree, gates: Gates) -> PyTree:
        """The next carry, elementwise."""

    def init(self, key: Key[Array, ""], inputs: int, state: int, dtype: Any = jnp.float32) -> Params:
        """Draws parameters: the input's LeCun-normal, each gate's recurrent matrix orthogonal, biases as the cell says.

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
            raise ValueError(
                explain(f"{self.name.upper()}.init", "widths are at least 1.", {"inputs I": inputs, "state N": state})
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(explain(f"{self.name.upper()}.init", "parameters are floats.", {"dtype": dtype}))
        input_key, state_key, bias_key = jax.random.split(key, 3)
        # half precision has no QR, from which the orthogonal matrices come
        drawn = jnp.float64 if dtype == jnp.float64 else jnp.float32
        shapes = self.shapes(inputs, state)
        params = {name: jnp.zeros(shape, drawn) for name, shape in shapes.items()}
        params["input"] = jax.nn.initializers.lecun_normal()(input_key, shapes["input"], drawn)
        if "state" in shapes:
            keys = jax.random.split(state_key, self.gates)
            square = jax.nn.initializers.orthogonal()
            params["state"] = jnp.concatenate([square(one, (state, state), drawn) for one in keys], axis=1)
        params["bias"] = self.init_bias(bias_key, state, drawn)
        return {name: value.astype(dtype) for name, value in params.items()}

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        """Zeros, unless the cell knows better."""
        return jnp.zeros(self.gates * state, dtype)

    def project(self, params: Params, x: Float[Array, "*B I"]) -> Gates:
        """What the inputs add to each gate, for any number of times at once; linear."""
        return gate_products(x, params["input"], self.gates)

    def biases(self, params: Params, axes: int) -> Gates:
        """The bias of each gate, with this many axes."""
        return _split(params["bias"].reshape((1,) * (axes - 1) + (-1,)), self.gates)

    def step(self, params: Params, carry: PyTree, x: Float[Array, "*B I"]) -> tuple[PyTree, Float[Array, "*B N"]]:
        """One step, from the carry and one input: (the next carry, the output)."""
        carry = self.combine(carry, self.join(self.project(params, x), self.recur(params, carry)))
        return carry, self.output(carry)

    def output(self, carry: PyTree) -> Float[Array, "*B N"]:
        """What the world sees of a carry: h."""
        return carry

    def carry_of(self, h: Any) -> PyTree:
        """A carry all of whose arrays are h."""
        return h

    def state_width(self, params: Params) -> int:
        """N, read off the parameters."""
        return params["bias"].shape[0] // self.gates


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

    def combine(self, carry: PyTree, gates: Gates) -> PyTree:
        return jnp.tanh(gates[0])


@final
@dataclasses.dataclass(frozen=True)
class Gru(Cell):
    """Gated recurrent unit, with the reset gate after the product and the hidden bias inside it, as cuDNN has it.

    r, z = σ(x W + h U + b);  n = tanh(x Wₙ + bₙ + r (h Uₙ + d));  h' = (1 - z) n + z h.

    Parameters: `input` W (I, 3N), `state` U (N, 3N), `bias` b (3N,) for r, z, n in this order, `state_bias` d (N,).
    Flax's NNX cell has no d, its linen cell has; torch has two biases per gate, of which those of r and z add up.

    References:
        Cho et al., Learning phrase representations using RNN encoder-decoder, 2014.
    """

    name: str = "gru"
    gates: int = 3

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        return super().shapes(inputs, state) | {"state_bias": (state,)}

    def recur(self, params: Params, carry: PyTree) -> Gates:
        r, z, n = gate_products(carry, params["state"], 3)
        bias_r, bias_z, bias_n = self.biases(params, r.ndim)
        return r + bias_r, z + bias_z, bias_n, n + params["state_bias"].reshape((1,) * (r.ndim - 1) + (-1,))

    def join(self, inner: Gates, inside: Gates) -> Gates:
        return *jax.tree.map(jnp.add, inner, inside[:3]), inside[3]

    def combine(self, carry: PyTree, gates: Gates) -> PyTree:
        r, z, n, n_inside = gates
        new = jnp.tanh(n + jax.nn.sigmoid(r) * n_inside)
        return new + jax.nn.sigmoid(z) * (carry - new)


@final
@dataclasses.dataclass(frozen=True)
class Lstm(Cell):
    """Long short-term memory: i, f, o = σ(x W + h U + b); g = tanh(x W + h U + b); c' = f c + i g; h' = o tanh(c').

    Parameters: `input` W (I, 4N), `state` U (N, 4N), `bias` b (4N,) for i, f, g, o in this order; `init` gives f a
    bias of 1. Carry: `LstmState(h, c)`. Torch has two biases, of which b is the sum.

    References:
        Hochreiter and Schmidhuber, Long short-term memory, 1997. Jozefowicz et al., An empirical exploration of
        recurrent network architectures, 2015 (the bias of 1).
    """

    name: str = "lstm"
    gates: int = 4

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        return jnp.repeat(jnp.array([0, 1, 0, 0], dtype), state)

    def combine(self, carry: PyTree, gates: Gates) -> PyTree:
        i, f, g, o = gates
        c = jax.nn.sigmoid(f) * carry.c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return LstmState(jax.nn.sigmoid(o) * jnp.tanh(c), c)

    def output(self, carry: PyTree) -> Float[Array, "*B N"]:
        return carry.h

    def carry_of(self, h: Any) -> PyTree:
        return LstmState(h, h)


@final
@dataclasses.dataclass(frozen=True)
class Linear(Cell):
    """A gated linear recurrence: a = σ(x Wₐ + bₐ); h' = a h + (1 - a) (x W + b).

    The gate sees the input only, so a step is linear in h and all times can be computed at once
    (`unroll_associative`). Parameters: `input` (I, 2N) and `bias` (2N,), for a and the new value in this order; `init`
    spreads the time constants of a from 2 to 100 steps.

    References:
        Martin and Cundy, Parallelizing linear recurrent neural nets over sequence length, 2018. Feng et al., Were RNNs
        all we needed?, 2024.
    """

    name: str = "linear"
    gates: int = 2

    def shapes(self, inputs: int, state: int) -> dict[str, tuple[int, ...]]:
        return {"input": (inputs, 2 * state), "bias": (2 * state,)}

    def init_bias(self, key: Key[Array, ""], state: int, dtype: Any) -> Float[Array, "G"]:
        # σ(log(s - 1)) = 1 - 1/s: one part in s is forgotten at each step
        spread = jax.random.uniform(key, (state,), dtype, maxval=math.log(99))
        return jnp.concatenate([spread, jnp.zeros_like(spread)])

    def recur(self, params: Params, carry: PyTree) -> Gates:
        return self.biases(params, carry.ndim)

    def combine(self, carry: PyTree, gates: Gates) -> PyTree:
        a, b = self.affine(gates)
        return a * carry + b

    def affine(self, gates: Gates) -> tuple[Float[Array, "*B N"], Float[Array, "*B N"]]:
        """(a, b) of h' = a h + b."""
        return jax.nn.sigmoid(gates[0]), jax.nn.sigmoid(-gates[0]) * gates[1]


class Turned(NamedTuple):
    """A weight matrix (I, G) that lies in memory as (G, I)."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """(I, G)."""
        return self.array.shape[::-1]


def gate_products(x: Float[Array, "*B I"], weights: Any, gates: int) -> Gates:
    """x W for each gate's part W of the weights; in full precision unless the caller's matmul precision says otherwise.

    A few rows, one step, are quickest in one wide product; for many rows cutting it apart would cost a copy.
    """
    if isinstance(weights, Turned) or math.prod(x.shape[:-1]) < weights.shape[0]:
        return _split(_product(x, weights), gates)
    return tuple(_product(x, part) for part in _split(weights, gates))


def _product(x: Float[Array, "*B I"], weights: Any) -> Float[Array, "*B G"]:
    chosen = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    precision = None if chosen else lax.Precision.HIGHEST
    # Merging time and batch saves the weights' gradient a transposed copy, but makes a sharded batch be gathered.
    flat = x.reshape(-1, x.shape[-1]) if jax.device_count() == 1 else x
    matrix, axis = (weights.array, 1) if isinstance(weights, Turned) else (weights, 0)
    wide = lax.dot_general(flat, matrix, (((flat.ndim - 1,), (axis,)), ((), ())), precision=precision)
    return wide.reshape(*x.shape[:-1], weights.shape[-1])


def _split(x: Float[Array, "*B G"], parts: int) -> Gates:
    return tuple(jnp.split(x, parts, axis=-1))


ELMAN = Elman()
GRU = Gru()
LSTM = Lstm()
LINEAR = Linear()
CELLS: dict[str, Cell] = {cell.name: cell for cell in (ELMAN, GRU, LSTM, LINEAR)}
