"""Recurrent networks: the step of a cell, unrolled over time by `lax.scan`.

An RNN is the honest contrast to attention: all it remembers is a state of width N, and it takes T steps one by one. A
linear recurrence is the third way: `lax.associative_scan` finds its T states in about log₂ T dependent steps.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from .cells import CELLS as CELLS
from .cells import ELMAN as ELMAN
from .cells import GRU as GRU
from .cells import LINEAR as LINEAR
from .cells import LSTM as LSTM
from .cells import Cell as Cell
from .cells import LstmState as LstmState
from .cells import Turned
from .errors import explain
from .given import AnyArray, is_concrete, kind_of

FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)


def unroll(
    cell: Cell,
    params: dict[str, Any],
    x: Float[AnyArray, "*B T I"],
    carry: PyTree = None,
    *,
    lengths: int | Int[AnyArray, "*B"] | None = None,
    reverse: bool = False,
) -> tuple[PyTree, Float[Array, "*B T N"]]:
    """carry, y[t] = cell.step(params, carry, x[t]) for t = 0, 1, … T - 1, one after the other.

    The input's products are one before the loop, the weights' gradients one after it. Reverse mode keeps x and, per
    step, carry and gates (2 N numbers to 6 N). Any derivative of any order works.

    Args:
        cell: `ELMAN`, `GRU`, `LSTM` or `LINEAR`; `CELLS` has them by name.
        params: of this cell, as its `init` draws them and its class describes them.
        x: inputs, any batch axes in front.
        carry: state before the first step, zeros by default; as an unroll returned it, to go on from there. With
            `reverse` that is the unroll of what comes later.
        lengths: how many inputs of each row count, from the left; an int or 0-d array for all rows. After them the
            state stands still and outputs are exactly zero; what x holds there, NaN included, reaches no output, state
            or gradient. A traced length beyond T means T.
        reverse: from each row's last input to its first; outputs stay with their inputs.

    Returns:
        carry: after each row's last step, `(..., N)`, for an LSTM `LstmState(h, c)` of such. Its dtype is float64 where
            x, params or carry has any, else float32 (rounding a state at each step adds up). All is computed in it.
        outputs: h after each step, in the dtype of x.

    Raises:
        TypeError: x, params, carry or lengths are no arrays of the right kind, or cell is not a Cell.
        ValueError: ranks, widths or names that do not fit, lengths (Python's or NumPy's) outside 0 … T.

    Example:
        >>> params = GRU.init(jax.random.key(0), inputs=3, state=4)
        >>> x = jnp.ones((2, 5, 3))
        >>> carry, outputs = unroll(GRU, params, x, lengths=jnp.array([5, 2]))
        >>> carry.shape, outputs.shape, float(abs(outputs[1, 2:]).max())
        ((2, 4), (2, 5, 4), 0.0)
    """
    _check("unroll", cell, params, x, carry, lengths)
    return _unroll(cell, bool(reverse), "scan", params, x, carry, lengths)


def unroll_associative(
    params: dict[str, Any],
    x: Float[AnyArray, "*B T I"],
    carry: PyTree = None,
    *,
    lengths: int | Int[AnyArray, "*B"] | None = None,
    reverse: bool = False,
) -> tuple[Float[Array, "*B N"], Float[Array, "*B T N"]]:
    """`unroll(LINEAR, …)`, all times at once: steps h → a h + b compose into such steps, by `lax.associative_scan`.

    The same answers and gradients up to rounding, in about 2 log₂ T dependent steps instead of T, for about twice the
    elementwise work and log T passes over memory. Arguments, results and errors as in `unroll`.

    References:
        Blelloch, Prefix sums and their applications, 1990.

    Example:
        >>> params = LINEAR.init(jax.random.key(0), inputs=3, state=4)
        >>> x = jax.random.normal(jax.random.key(1), (2, 5, 3))
        >>> _, one_by_one = unroll(LINEAR, params, x)
        >>> _, at_once = unroll_associative(params, x)
        >>> bool(jnp.allclose(one_by_one, at_once, atol=1e-6))
        True
    """
    _check("unroll_associative", LINEAR, params, x, carry, lengths)
    return _unroll(LINEAR, bool(reverse), "associative", params, x, carry, lengths)


def bidirectional(
    cell: Cell,
    params: tuple[dict[str, Any], dict[str, Any]],
    x: Float[AnyArray, "*B T I"],
    carry: tuple[PyTree, PyTree] | None = None,
    *,
    lengths: int | Int[AnyArray, "*B"] | None = None,
) -> tuple[tuple[PyTree, PyTree], Float[Array, "*B T M"]]:
    """Two unrolls over the same inputs, one from each end: ((carry, carry), [forward, backward]).

    Args:
        cell, x, lengths: as in `unroll`; the backward one starts at each row's own end.
        params: (forward, backward), each its own parameters; the widths of the states may differ.
        carry: (forward, backward).

    Returns:
        Both carries, and both outputs side by side: at t the first has seen 0 … t, the second t … length - 1.

    Raises:
        TypeError: params or carry is not a pair; else as `unroll`.

    Example:
        >>> one, two = (GRU.init(jax.random.key(seed), inputs=3, state=4) for seed in (0, 1))
        >>> carries, outputs = bidirectional(GRU, (one, two), jnp.ones((2, 5, 3)))
        >>> outputs.shape
        (2, 5, 8)
    """
    carry = (None, None) if carry is None else carry
    for name, pair in (("params", params), ("carry", carry)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or hasattr(pair, "_fields"):
            rule = f"{name} must be a pair (forward, backward)."
            raise TypeError(explain("bidirectional", rule, {name: type(pair).__name__}))
    forward, seen = unroll(cell, params[0], x, carry[0], lengths=lengths)
    backward, to_come = unroll(cell, params[1], x, carry[1], lengths=lengths, reverse=True)
    return (forward, backward), jnp.concatenate([seen, to_come], axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _unroll(cell: Cell, reverse: bool, how: str, params: Any, x: Any, carry: Any, lengths: Any) -> tuple[PyTree, Array]:
    wide = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves((params, x, carry)))
    given, dtype = x.dtype, jnp.float64 if wide else jnp.float32
    params, x, carry = jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(dtype), (params, x, carry))
    x, valid = jnp.moveaxis(x, -2, 0), None
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        lengths = lengths.reshape(lengths.shape or (1,) * (x.ndim - 2))
        time = jnp.arange(x.shape[0], dtype=jnp.int32).reshape((-1,) + (1,) * (x.ndim - 2))
        valid = (time < lengths[None].astype(jnp.int32))[..., None]
        x = jnp.where(valid, x, jnp.zeros_like(x))
    inner = cell.project(params, x)
    if carry is None:
        carry = cell.carry_of(jnp.zeros_like(inner[0].sum(axis=0)))
    if x.shape[0] == 0:
        return carry, jnp.moveaxis(jnp.zeros_like(inner[0]), 0, -2).astype(given)
    inside = {name: value for name, value in params.items() if name != "input"}
    if how == "scan":
        carry, outputs = _scan(cell, reverse, inside, inner, _as_stepped(cell, inside, inner, carry, valid), valid)
    else:
        carry, outputs = _associative(reverse, inside, inner, carry, valid)
    if valid is not None:
        outputs = jnp.where(valid, outputs, jnp.zeros_like(outputs))
    return carry, jnp.moveaxis(outputs, 0, -2).astype(given)


def _advance(cell: Cell, carry: PyTree, gates: PyTree, valid: Array | None) -> PyTree:
    new = cell.combine(carry, gates)
    return new if valid is None else jax.tree.map(lambda one, old: jnp.where(valid, one, old), new, carry)


def _as_stepped(cell: Cell, params: Any, inner: Any, carry: PyTree, valid: Array | None) -> PyTree:
    """The carry, varying and sharded over the mesh axes that a step makes it vary over, as a scan's carry must."""
    first, now = jax.tree.map(lambda one: one[0], (inner, valid))
    stepped = _advance(cell, carry, cell.join(first, cell.recur(params, carry)), now)
    return jax.tree.map(lambda one, like: one + jnp.zeros_like(like), carry, stepped)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _scan(cell: Cell, reverse: bool, params: Any, inner: Any, carry: PyTree, valid: Any) -> tuple[PyTree, Array]:
    """(the last carry, all outputs), time first."""

    def step(carry: PyTree, now: Any) -> tuple[PyTree, Array]:
        inner, valid = now
        carry = _advance(cell, carry, cell.join(inner, cell.recur(params, carry)), valid)
        return carry, cell.output(carry)

    return lax.scan(step, carry, (inner, valid), reverse=reverse)


@_scan.defjvp
def _scan_tangent(cell: Cell, reverse: bool, primals: Any, tangents: Any) -> Any:
    """What is nonlinear is computed before the loop over tangents, which transposes into a lean backward loop.

    Parameters enter that loop as constants: what their tangents add to the gates is one product for all times, so that
    its transpose, their gradient, is one too, and not a sum of T matrices.
    """
    params, inner, carry, valid = primals
    params_dot, inner_dot, carry_dot, _ = tangents

    def step(carry: PyTree, now: Any) -> tuple[PyTree, Any]:
        inner, valid = now
        gates = cell.join(inner, cell.recur(params, carry))
        return _advance(cell, carry, gates, valid), (carry, gates)

    last, (before, gates) = lax.scan(step, carry, (inner, valid), reverse=reverse)
    _, inside_dot = jax.jvp(lambda params: cell.recur(params, before), (params,), (params_dot,))
    # the loop over cotangents multiplies by the transpose at each step: as it lies, a tenth of the time for N = 512
    turned = params | {"state": Turned(params["state"].T)} if "state" in params else params
    no_inner = jax.tree.map(lambda one: jnp.zeros_like(one[0]), inner)

    def step_dot(carry_dot: PyTree, now: Any) -> tuple[PyTree, PyTree]:
        before, gates, outer_dot, valid = now
        _, inner_dot = jax.jvp(lambda carry: cell.join(no_inner, cell.recur(turned, carry)), (before,), (carry_dot,))
        gates_dot = jax.tree.map(jnp.add, outer_dot, inner_dot)
        advance = lambda carry, gates: _advance(cell, carry, gates, valid)  # noqa: E731
        return jax.jvp(advance, (before, gates), (carry_dot, gates_dot))[1], carry_dot

    # keeps the gates, and not the derivatives of all their nonlinearities: writing those costs more than computing them
    step_dot = jax.checkpoint(step_dot, prevent_cse=False)
    outer_dot = cell.join(inner_dot, inside_dot)
    last_dot, before_dot = lax.scan(step_dot, carry_dot, (before, gates, outer_dot, valid), reverse=reverse)
    return (last, _after(cell, reverse, before, last)), (last_dot, _after(cell, reverse, before_dot, last_dot))


def _after(cell: Cell, reverse: bool, before: PyTree, last: PyTree) -> Array:
    """The outputs after each step, from the carries before each and the last."""
    h, end = cell.output(before), cell.output(last)[None]
    return jnp.concatenate([end, h[:-1]] if reverse else [h[1:], end])


def _associative(reverse: bool, params: Any, inner: Any, carry: Array, valid: Any) -> tuple[Array, Array]:
    a, b = LINEAR.affine(LINEAR.join(inner, LINEAR.recur(params, inner[0])))
    if valid is not None:
        a, b = jnp.where(valid, a, jnp.ones_like(a)), jnp.where(valid, b, jnp.zeros_like(b))
    then = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])  # noqa: E731
    a, b = lax.associative_scan(then, (a, b), reverse=reverse)
    h = a * carry[None] + b
    return h[0 if reverse else -1], h


def _check(function: str, cell: Any, params: Any, x: Any, carry: Any, lengths: Any) -> None:
    """The public door: kinds, then ranks and widths, then values."""
    if not isinstance(cell, Cell):
        facts = {"cell": repr(cell), "known": ", ".join(CELLS)}
        raise TypeError(explain(function, "cell must be a Cell.", facts, 'For example GRU, or CELLS["gru"].'))
    if not isinstance(params, dict):
        raise TypeError(explain(function, "params must be a dict of arrays.", {"params": type(params).__name__}))
    for name, array in {"x": x, **params}.items():
        _check_floats(function, name, array)
    if x.ndim < 2:
        rule, remedy = "x has an axis of time and one of features.", "One number per step is x[..., None]."
        raise ValueError(explain(function, rule, {"x (..., T, I)": x.shape}, remedy))
    state = math.prod(params["bias"].shape) // cell.gates if "bias" in params else 0
    expected = cell.shapes(x.shape[-1], state)
    if {name: array.shape for name, array in params.items()} != expected:
        facts = {"x (..., T, I)": x.shape}
        facts |= {f"{name}, expected": shape for name, shape in expected.items()}
        facts |= {f"{name}, given": array.shape for name, array in params.items()}
        raise ValueError(explain(function, f"these are not parameters of {cell.name} for these inputs.", facts))
    if carry is not None:
        _check_carry(function, cell, carry, (*x.shape[:-2], state))
    if lengths is not None:
        _check_lengths(function, lengths, x.shape)


def _check_floats(function: str, name: str, array: Any) -> None:
    if not isinstance(array, AnyArray):
        remedy = f"Make an array of it: jnp.asarray({name})."
        raise TypeError(explain(function, f"{name} must be an array, not {type(array).__name__}.", {}, remedy))
    if array.dtype not in FLOATS:
        rule = f"{name} must hold floats: float16, bfloat16, float32 or float64."
        raise TypeError(explain(function, rule, {name: f"{array.dtype}{array.shape}"}))


def _check_carry(function: str, cell: Cell, carry: Any, shape: tuple[int, ...]) -> None:
    expected = cell.carry_of(jax.ShapeDtypeStruct(shape, jnp.float32))
    if jax.tree.structure(carry) != jax.tree.structure(expected):
        facts = {"expected": jax.tree.structure(expected), "given": jax.tree.structure(carry)}
        raise TypeError(explain(function, f"carry must be that of {cell.name}, as unroll returns it.", facts))
    for array in jax.tree.leaves(carry):
        _check_floats(function, "carry", array)
        if array.shape != shape:
            rule = "the carry has the batch axes of x, and the width N of the state."
            raise ValueError(explain(function, rule, {"carry (..., N)": array.shape, "expected": shape}))


def _check_lengths(function: str, lengths: Any, shape: tuple[int, ...]) -> None:
    if kind_of(lengths) not in ("i", "u"):
        shown = f"{lengths.dtype}{lengths.shape}" if hasattr(lengths, "dtype") else type(lengths).__name__
        raise TypeError(explain(function, "lengths must be an int or an array of integers.", {"lengths": shown}))
    if np.shape(lengths) not in ((), shape[:-2]):
        facts = {"lengths": np.shape(lengths), "x (..., T, I)": shape}
        raise ValueError(explain(function, "lengths has the batch axes of x, one length per row, or none.", facts))
    if is_concrete(lengths):
        values, time = np.asarray(lengths), shape[-2]
        if values.size and (values.min() < 0 or values.max() > time):
            facts = {"smallest": values.min(), "largest": values.max(), "T": time}
            raise ValueError(explain(function, "a length is at least 0 and at most T.", facts))
