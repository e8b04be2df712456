"""Recurrent networks: a cell's step, unrolled over time by `lax.scan`; for the linear cell by `lax.associative_scan` too.

An RNN is the honest contrast to attention: its memory is one state of width N, and T steps must be taken one after the
other. The linear recurrence is the third way: a state, but parallel over time in log T dependent steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .cells import CELLS as CELLS
from .cells import ELMAN as ELMAN
from .cells import GRU as GRU
from .cells import LINEAR as LINEAR
from .cells import LSTM as LSTM
from .cells import Cell as Cell
from .cells import LstmState as LstmState
from .errors import explain

AnyArray = jax.Array | np.ndarray


def unroll(
    cell: Cell,
    params: dict[str, Any],
    x: Float[AnyArray, "*B T I"],
    carry: PyTree = None,
    *,
    lengths: Int[AnyArray, "*B"] | None = None,
    reverse: bool = False,
) -> tuple[PyTree, Float[Array, "*B T N"]]:
    """carry, y[t] = step(params, carry, x[t]), for t = 0 … T - 1.

    Example:
        >>> params = GRU.init(jax.random.key(0), inputs=3, state=4)
        >>> carry, outputs = unroll(GRU, params, jnp.ones((2, 5, 3)))
        >>> carry.shape, outputs.shape
        ((2, 4), (2, 5, 4))
    """
    dtype, params, x, carry, valid = _resolve("unroll", cell, params, x, carry, lengths)
    return _unroll(cell, reverse, params, x, carry, valid, dtype)


def _resolve(function, cell, params, x, carry, lengths):
    x = jnp.asarray(x)
    leaves = [x, *jax.tree.leaves((params, carry))]
    wide = jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in leaves) else jnp.float32
    valid = None
    if lengths is not None:
        valid = jnp.arange(x.shape[-2], dtype=jnp.int32) < jnp.asarray(lengths).astype(jnp.int32)[..., None]
    return wide, params, x, carry, valid


@functools.partial(jax.jit, static_argnums=(0, 1, 6))
def _unroll(cell, reverse, params, x, carry, valid, dtype):
    out_dtype = x.dtype
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), params)
    x = jnp.moveaxis(x.astype(dtype), -2, 0)
    if valid is not None:
        valid = jnp.moveaxis(valid, -1, 0)[..., None]
        x = jnp.where(valid, x, jnp.zeros_like(x))
    inner = cell.project(params, x)
    zeros = jnp.zeros_like(inner.sum(axis=0)[..., : cell.state_width(params)])
    carry = cell.carry_like(zeros) if carry is None else jax.tree.map(lambda leaf: leaf.astype(dtype), carry)
    carry, outputs = scan_steps(cell, reverse, params, inner, carry, valid)
    if valid is not None:
        outputs = jnp.where(valid, outputs, jnp.zeros_like(outputs))
    return carry, jnp.moveaxis(outputs, 0, -2).astype(out_dtype)


def scan_steps(cell, reverse, params, inner, carry, valid):
    def step(carry, at):
        inner, valid = at
        new = cell.combine(carry, inner, cell.recur(params, carry))
        if valid is not None:
            new = jax.tree.map(lambda new, old: jnp.where(valid, new, old), new, carry)
        return new, cell.output(new)

    return lax.scan(step, carry, (inner, valid), reverse=reverse)
