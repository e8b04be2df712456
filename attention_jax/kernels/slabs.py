"""The two derivatives as plain code, which JAX differentiates again: for second and higher orders, of every kernel.

A slab is a few rows of queries with all their keys, computed as the dense kernel does. Slabs follow one another in a
scan whose steps are rematerialised, so that what lives at once is linear in T. Rows come in as what the scan goes over:
arrays that are cut inside a step have a gradient of their whole size for each step.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .axes import on_same_manual_axes
from .call import Operands, Result, Setting, computing_dtype
from .dense import Dense
from .junk import clear

LOGITS_AT_ONCE = 2**19  # of a slab: 2 MiB
FEWEST_ROWS = 8  # of a slab: fewer make products slow

Tree = TypeVar("Tree")


def tangent(operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result:
    """The derivative of (out, lse) along tangents."""
    operands, setting, result, tangents = on_same_manual_axes((operands, setting, result, tangents))
    clean = _cleared if setting.hides(operands) else _same
    (rows, shared), (rows_dot, shared_dot) = _split(operands, operands), _split(tangents, operands)
    shared, shared_dot = clean(shared), clean(shared_dot)

    def one(given: Any, first: Any) -> tuple[Any, None]:
        rows, result, rows_dot = clean(given)
        operands, tangents = _joined(rows, shared), _joined(rows_dot, shared_dot)
        moved = Dense().tangent(operands, _at(setting, first), _from_rows(result), tangents)
        return _to_rows(moved), None

    moved, _ = _by_slabs(one, (rows, _to_rows(result), rows_dot), None, _rows_at_once(operands))
    return _from_rows(moved)


def backward(operands: Operands, setting: Setting, result: Result, cotangents: Result, wanted: Operands) -> Operands:
    """The transpose of `tangent`: the gradients that are wanted, in the dtypes of the operands."""
    operands, setting, result, cotangents = on_same_manual_axes((operands, setting, result, cotangents))
    clean, dtype = _cleared if setting.hides(operands) else _same, computing_dtype(operands)
    rows, shared = _split(operands, operands)
    shared = clean(jax.tree.map(lambda x: x.astype(dtype), shared))

    def one(given: Any, first: Any) -> tuple[Any, Any]:
        rows, result, cotangents = clean(given)
        operands = _joined(rows, shared)
        result, cotangents = _from_rows(result), _from_rows(cotangents)
        grads = Dense().backward(operands, _at(setting, first), result, cotangents, wanted)
        return _split(grads, operands)

    given = rows, _to_rows(result), _to_rows(cotangents)
    asked = (None if like is None else x for x, like in zip(shared, wanted, strict=True))
    zeros = jax.tree.map(jnp.zeros_like, Operands(*asked))
    by_rows, summed = _by_slabs(one, given, zeros, _rows_at_once(operands))
    return jax.tree.map(lambda x, g: g.astype(x.dtype), wanted, _joined(by_rows, summed))


# Second order differentiates products, and 0 · NaN is NaN in their transposes too. So slabs know no NaN and inf, but
# where -inf says that a pair or a row is hidden. What saw the junk is known from the first order: see `marked`.


def _cleared(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.where(x == -jnp.inf, x, clear(x)), tree)


def _same(tree: Tree) -> Tree:
    return tree


def marked(second: Tree, first: Tree, operands: Operands, setting: Setting) -> Tree:
    """`second`, the derivative of `first`: NaN where `first` is not finite."""
    if not setting.hides(operands):
        return second
    mark = lambda x, y: jnp.where(jnp.isfinite(x), y, jnp.full_like(y, jnp.nan))  # noqa: E731
    return jax.tree.map(mark, first, second)


def _split(of: Operands, operands: Operands) -> tuple[Operands, Operands]:
    """What lies along the queries' rows, and what all rows share."""
    q, k, v, bias = of
    shares = operands.bias is None or operands.bias.shape[-2] == 1
    none = Operands(None, None, None)
    return none._replace(q=q, bias=None if shares else bias), none._replace(k=k, v=v, bias=bias if shares else None)


def _joined(rows: Operands, shared: Operands) -> Operands:
    return Operands(*(a if b is None else b for a, b in zip(rows, shared, strict=True)))


def _to_rows(result: Result) -> Result:
    return Result(result.out, result.lse[..., None])


def _from_rows(result: Result) -> Result:
    return Result(result.out, result.lse[..., 0])


def _at(setting: Setting, first: Any) -> Setting:
    return dataclasses.replace(setting, first=first, clean=True)


def _rows_at_once(operands: Operands) -> int:
    whole = (*operands.q.shape[:-2], operands.k.shape[-2])
    return max(FEWEST_ROWS, LOGITS_AT_ONCE // max(1, math.prod(n for n in whole if isinstance(n, int))))


def _by_slabs(one: Callable[[Any, Any], tuple[Any, Any]], rows: Any, total: Any, size: int) -> tuple[Any, Any]:
    """`one(rows of a slab, its first row)` for every slab.

    Args:
        one: gives what belongs to the rows, and what is summed over slabs.
        rows: arrays `(..., T, n)`.
        total: where the sums start.
        size: rows of a slab.

    Returns:
        The rows' results below each other, and the sums.
    """
    one, length = jax.checkpoint(one), jax.tree.leaves(rows)[0].shape[-2]
    if not isinstance(length, int) or length <= size:
        return one(rows, None)
    slabs, rest = divmod(length, size)

    def step(total: Any, given: Any) -> tuple[Any, Any]:
        by_rows, summed = one(*given)
        return jax.tree.map(jnp.add, total, summed), by_rows

    cut = jax.tree.map(lambda x: _in_slabs(x, slabs, size), rows)
    total, by_rows = lax.scan(step, total, (cut, np.arange(slabs, dtype=np.int32) * np.int32(size)))
    by_rows = jax.tree.map(_below_each_other, by_rows)
    if rest:
        last, summed = one(jax.tree.map(lambda x: x[..., slabs * size :, :], rows), np.int32(slabs * size))
        by_rows = jax.tree.map(lambda x, y: jnp.concatenate([x, y], -2), by_rows, last)
        total = jax.tree.map(jnp.add, total, summed)
    return by_rows, total


def _in_slabs(x: Array, slabs: int, size: int) -> Array:
    x = x[..., : slabs * size, :]
    return jnp.moveaxis(x.reshape(*x.shape[:-2], slabs, size, x.shape[-1]), -3, 0)


def _below_each_other(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, -3)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])
