"""One set of differentiation rules for every kernel: all orders, keeping only what is linear in T.

A kernel gives three functions: `forward` computes (out, lse); `tangent` is the derivative of these along given
tangents, linear in them; `backward` is the transpose of `tangent`. The rules put them together:

- `attend` is `forward` with a `custom_jvp`. What it keeps for later is (q, k, v, bias, out, lse), never the weights.
- The tangent is a primitive of its own, so that its transpose, which reverse mode asks for, is `backward`.
- Second and higher orders differentiate the code of `tangent` and `backward`, rematerialised.
- `vmap` of the primitive is remembered as a stack of mapped axes, and applied when the code runs.

`out` and `lse` carry the checkpoint names `attention_out` and `attention_lse`: a rematerialisation policy that saves
these two does not run the forward pass again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from .axes import on_automatic_axes
from .call import Cost, Operands, Setting
from .junk import clear


class Result(NamedTuple):
    """`out (..., H, T, V)` and `lse (..., H, T)`, both in the computing dtype; tangents and cotangents look alike."""

    out: Any
    lse: Any


@runtime_checkable
class Kernel(Protocol):
    """An implementation of attention. `operands` hold tangents or None where there is none."""

    name: str

    def forward(self, operands: Operands, setting: Setting) -> Result: ...

    def tangent(self, operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result: ...

    def backward(self, operands: Operands, setting: Setting, result: Result, cotangents: Result) -> Operands: ...

    def cost(self, operands: Operands, setting: Setting) -> Cost: ...

    def weights(self, operands: Operands, setting: Setting, lse: Any) -> Any: ...


def weights_of(kernel: Kernel, operands: Operands, setting: Setting, lse: Any) -> Any:
    """The weights of a kernel that can give them, after the softmax and before dropout."""
    run = on_automatic_axes(kernel.weights, lambda *specs: PartitionSpec(*specs[0].q[:-1], None))
    return run(operands, setting, lse)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend(kernel: Kernel, operands: Operands, setting: Setting) -> Result:
    """(out, lse) of a kernel, differentiable in the operands any number of times, forwards and backwards."""
    forward = on_automatic_axes(kernel.forward, lambda operands, _: _result_like(operands.q))
    return forward(operands, setting)


def _attend_jvp(kernel: Kernel, primals: tuple[Operands, Setting], tangents: tuple[Any, Any]) -> tuple[Result, Result]:
    operands, setting = primals
    result = _named(attend(kernel, operands, setting))
    given = Operands(*(None if x is None or isinstance(x, SymbolicZero) else x for x in tangents[0]))
    if all(x is None for x in given):
        return result, Result(*map(jnp.zeros_like, result))
    kept, tree = jax.tree.flatten((operands, setting, result))
    along = [x for x in given if x is not None]
    static = {"kernel": kernel, "tree": tree, "given": tuple(x is not None for x in given), "mapped": ()}
    return result, Result(*tangent_p.bind(*kept, *along, **static))


attend.defjvp(_attend_jvp, symbolic_zeros=True)


def _result_like(q: PartitionSpec) -> Result:
    return Result(PartitionSpec(*q[:-1], None), PartitionSpec(*q[:-1]))


def _named(result: Result) -> Result:
    return Result(checkpoint_name(result.out, "attention_out"), checkpoint_name(result.lse, "attention_lse"))


# The primitive. Its arrays are the leaves of `tree`, which is (operands, setting, result), then the tangents that are
# `given`, of q, k, v and bias. `mapped` holds one tuple for each `vmap` it went through, innermost first: for each
# array, whether its axis 0 is mapped.
tangent_p = Primitive("attention_tangent")
tangent_p.multiple_results = True
Mapped = tuple[tuple[bool, ...], ...]


def _tangent(*arrays: Any, kernel: Kernel, tree: Any, given: tuple[bool, ...], mapped: Mapped) -> list[Any]:
    def one(*arrays: Any) -> list[Any]:
        operands, setting, result = jax.tree.unflatten(tree, arrays[: tree.num_leaves])
        along = iter(arrays[tree.num_leaves :])
        tangents = Operands(*(next(along) if there else None for there in given))
        run = on_automatic_axes(kernel.tangent, lambda *specs: Result(*specs[2]))
        return list(run(operands, setting, result, tangents))

    return _over_mapped(one, mapped)(*arrays)


def _over_mapped(fn: Callable[..., Any], mapped: Mapped) -> Callable[..., Any]:
    for axes in mapped:
        fn = jax.vmap(fn, in_axes=tuple(0 if axis else None for axis in axes))
    return fn


_STATIC = ("kernel", "tree", "given", "mapped")
tangent_p.def_impl(jax.jit(_tangent, static_argnames=_STATIC))
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))


@tangent_p.def_abstract_eval
def _avals(*arrays: Any, tree: Any, **_: Any) -> list[Any]:
    return [result.update(weak_type=False) for result in arrays[tree.num_leaves - 2 : tree.num_leaves]]


def _transpose(cotangents: Any, *arrays: Any, kernel: Kernel, tree: Any, given: Any, mapped: Mapped) -> list[Any]:
    """Reverse mode: the kernel's `backward`."""
    start = tree.num_leaves

    def one(*arrays: Any) -> list[Any]:
        operands, setting, result = jax.tree.unflatten(tree, arrays[:start])
        run = on_automatic_axes(functools.partial(_pull, kernel), lambda *specs: specs[0])
        grads = run(operands, setting, result, Result(*arrays[start:]))
        return [grad for grad, there in zip(grads, given, strict=True) if there]

    along = map(ad.instantiate_zeros, cotangents)
    axes = tuple((*each[:start], True, True) for each in mapped)
    grads = _over_mapped(one, axes)(*arrays[:start], *along)
    linear = [ad.is_undefined_primal(x) for x in arrays[start:]]
    return [None] * start + [grad if wanted else None for grad, wanted in zip(grads, linear, strict=True)]


ad.primitive_transposes[tangent_p] = _transpose


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pull(kernel: Kernel, operands: Operands, setting: Setting, result: Result, cotangents: Result) -> Operands:
    return kernel.backward(operands, setting, result, cotangents)


@_pull.defjvp
def _pull_jvp(kernel: Kernel, primals: Any, tangents: Any) -> tuple[Operands, Operands]:
    operands, setting, result, cotangents = primals

    def code(operands: Operands, result: Result, cotangents: Result) -> Operands:
        operands, result, cotangents = _cleared(setting, operands, result, cotangents)
        return kernel.backward(operands, setting, result, cotangents)

    moving = (tangents[0], *tangents[2:])
    grads = _pull(kernel, *primals)
    along = jax.jvp(jax.checkpoint(code), (operands, result, cotangents), moving)[1]
    return grads, _marked(setting, operands, grads, along)


# Second order differentiates products, and 0 · NaN is NaN in their transposes too. Where pairs may be hidden, junk is
# cleared first; what saw it is known from the first order, and marked.


def _cleared(setting: Setting, operands: Operands, result: Result, along: Any) -> tuple[Operands, Result, Any]:
    """Arrays without NaN and inf, but where -inf says that a pair or a row is hidden."""
    if not setting.hides(operands):
        return operands, result, along
    keep = lambda x: None if x is None else jnp.where(x == -jnp.inf, x, clear(x))  # noqa: E731
    q, k, v, bias = operands
    cleared = Operands(clear(q), clear(k), clear(v), keep(bias)), Result(clear(result.out), keep(result.lse))
    return *cleared, jax.tree.map(clear, along)


def _marked(setting: Setting, operands: Operands, first: Any, second: Any) -> Any:
    """The derivative of `first`, NaN where `first` is not finite."""
    if not setting.hides(operands):
        return second
    mark = lambda x, y: jnp.where(jnp.isfinite(x), y, jnp.full_like(y, jnp.nan))  # noqa: E731
    return jax.tree.map(mark, first, second)


def _jvp(primals: Any, tangents: Any, **static: Any) -> tuple[list[Any], list[Any]]:
    """Second order: linear in the tangents; the rest by differentiating the kernel's own code, rematerialised."""
    start = static["tree"].num_leaves
    out = tangent_p.bind(*primals, **static)
    if all(type(x) is ad.Zero for x in tangents[:start]):
        return out, tangent_p.bind(*primals[:start], *map(ad.instantiate_zeros, tangents[start:]), **static)
    moving = [n for n, x in enumerate(tangents) if type(x) is not ad.Zero]

    def code(*values: Any) -> list[Any]:
        arrays = list(primals)
        for n, value in zip(moving, values, strict=True):
            arrays[n] = value
        operands, setting, result = jax.tree.unflatten(static["tree"], arrays[:start])
        operands, result, along = _cleared(setting, operands, result, arrays[start:])
        return _tangent(*jax.tree.leaves((operands, setting, result)), *along, **static)

    along = tuple(primals[n] for n in moving), tuple(tangents[n] for n in moving)
    operands, setting, _ = jax.tree.unflatten(static["tree"], primals[:start])
    return out, _marked(setting, operands, out, jax.jvp(jax.checkpoint(code), *along)[1])


ad.primitive_jvps[tangent_p] = _jvp


def _batch(arrays: Any, dims: Any, **static: Any) -> tuple[list[Any], list[int]]:
    """`vmap`: mapped axes go in front; what is linear, and the result it resembles, is mapped in any case."""
    is_mapped = [dim is not None for dim in dims]
    size = next(x.shape[dim] for x, dim, mapped in zip(arrays, dims, is_mapped, strict=True) if mapped)
    always = static["tree"].num_leaves - 2
    moved = [jnp.moveaxis(x, dim, 0) if mapped else x for x, dim, mapped in zip(arrays, dims, is_mapped, strict=True)]
    for n in range(always, len(moved)):
        if not is_mapped[n]:
            moved[n] = jnp.broadcast_to(moved[n][None], (size, *moved[n].shape))
    axes = tuple(n >= always or mapped for n, mapped in enumerate(is_mapped))
    return tangent_p.bind(*moved, **(static | {"mapped": (*static["mapped"], axes)})), [0, 0]


batching.primitive_batchers[tangent_p] = _batch
