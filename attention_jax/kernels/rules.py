"""One set of differentiation rules for every kernel: all orders, keeping only what is linear in T.

A kernel gives three functions: `forward` computes (out, lse); `tangent` is the derivative of these along given
tangents, linear in them; `backward` is the transpose of `tangent`. Each is a primitive, so that its rule holds wherever
JAX meets it, however often:

- `forward_p` has `tangent_p` as its derivative. What that keeps is (q, k, v, bias, out, lse), never the weights.
- `tangent_p` is linear in the tangents, and its transpose, which reverse mode asks for, is `backward_p`.
- Second and higher orders differentiate the code of `slabs`, the same two functions for every kernel.
- `vmap` is remembered as a stack of mapped axes, and applied when the code runs.

`out` and `lse` carry the checkpoint names `attention_out` and `attention_lse`: a rematerialisation policy that saves
these two does not run the forward pass again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from . import slabs
from .axes import on_automatic_axes
from .call import Cost, Operands, Result, Setting, computing_dtype


@runtime_checkable
class Kernel(Protocol):
    """An implementation of attention. `tangents` are None where there are none, `wanted` where none are asked for."""

    name: str

    def forward(self, operands: Operands, setting: Setting) -> Result: ...

    def tangent(self, operands: Operands, setting: Setting, result: Result, tangents: Operands) -> Result: ...

    def backward(
        self, operands: Operands, setting: Setting, result: Result, cotangents: Result, wanted: Operands
    ) -> Operands: ...

    def cost(self, operands: Operands, setting: Setting) -> Cost: ...

    def refuses(self, weights: bool) -> str | None:
        """Why it cannot do a call that asks for weights, or not; None: it can."""
        ...

    def weights(self, operands: Operands, setting: Setting, lse: Any) -> Any: ...


class Pair(NamedTuple):
    """The kernel of a call that nobody differentiates, and the one that takes its place where somebody does."""

    alone: Kernel
    differentiated: Kernel


def attend(kernels: Pair, operands: Operands, setting: Setting) -> Result:
    """(out, lse), differentiable in the operands any number of times, forwards and backwards."""
    lse = jnp.zeros_like(operands.q.sum(-1), computing_dtype(operands))
    like = Result(jnp.broadcast_to(lse[..., None], (*lse.shape, operands.v.shape[-1])), lse)
    arrays, tree = jax.tree.flatten((operands, setting, like))
    return Result(*forward_p.bind(*arrays, kernel=kernels, tree=tree, mapped=()))


def weights_of(kernel: Kernel, operands: Operands, setting: Setting, lse: Any) -> Any:
    """The weights of a kernel that can give them, after the softmax and before dropout."""
    run = on_automatic_axes(kernel.weights, lambda *specs: PartitionSpec(*specs[0].q[:-1], None))
    return run(operands, setting, lse)


# ---------------------------------------------------------------- the primitives
#
# Their arrays are the leaves of `tree`, of which the last part but for the tangents is what the results resemble:
# (operands, setting, like), (operands, setting, result, tangents), (operands, setting, result, cotangents, like).
# `mapped` holds one tuple for each `vmap` it went through, innermost first: which arrays have a mapped axis 0.

Mapped = tuple[tuple[bool, ...], ...]
CODE: dict[Primitive, Callable[..., list[Any]]] = {}
LIKE = {"forward": 2, "tangent": 2, "backward": 4}


def _primitive(name: str, code: Callable[..., Any]) -> Primitive:
    """A primitive whose code is `code(kernel, *parts of the tree)`; that of `forward_p` is given a pair of kernels."""
    primitive, like = Primitive(f"attention_{name}"), LIKE[name]
    primitive.multiple_results = True

    def run(*arrays: Any, kernel: Kernel | Pair, tree: Any, mapped: Mapped) -> list[Any]:
        def one(*arrays: Any) -> list[Any]:
            on_axes = on_automatic_axes(lambda *parts: code(kernel, *parts), lambda *specs: specs[like])
            return jax.tree.leaves(on_axes(*jax.tree.unflatten(tree, arrays)))

        return _over_mapped(one, mapped)(*arrays)

    def avals(*arrays: Any, tree: Any, **_: Any) -> list[Any]:
        return [arrays[n].update(weak_type=False) for n in jax.tree.leaves(_places(tree)[like])]

    def batch(arrays: Any, dims: Any, **static: Any) -> tuple[list[Any], list[int]]:
        """Mapped axes go in front; what is linear, and what the results resemble, is mapped in any case."""
        flags = [dim is not None for dim in dims]
        size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
        moved = [jnp.moveaxis(x, dim, 0) if there else x for x, dim, there in zip(arrays, dims, flags, strict=True)]
        places = _places(static["tree"])
        for n in jax.tree.leaves((places[like], places[3:])):
            moved[n] = moved[n] if flags[n] else jnp.broadcast_to(moved[n][None], (size, *moved[n].shape))
            flags[n] = True
        out = primitive.bind(*moved, **(static | {"mapped": (*static["mapped"], tuple(flags))}))
        return out, [0] * len(out)

    CODE[primitive] = run
    primitive.def_impl(jax.jit(run, static_argnames=("kernel", "tree", "mapped")))
    primitive.def_abstract_eval(avals)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    batching.primitive_batchers[primitive] = batch
    return primitive


def _over_mapped(fn: Callable[..., Any], mapped: Mapped) -> Callable[..., Any]:
    for axes in mapped:
        fn = jax.vmap(fn, in_axes=tuple(0 if axis else None for axis in axes))
    return fn


def _places(tree: Any) -> Any:
    """The parts of a tree with the number of its array in place of each array."""
    return jax.tree.unflatten(tree, range(tree.num_leaves))


def code_of(equation: Any) -> Any:
    """The jaxpr that runs for an equation of one of these primitives, for those who read jaxprs; None for others."""
    if equation.primitive not in CODE:
        return None
    run = functools.partial(CODE[equation.primitive], **equation.params)
    return jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars)).jaxpr


forward_p = _primitive("forward", lambda kernels, operands, setting, _: kernels.alone.forward(operands, setting))
tangent_p = _primitive("tangent", lambda kernel, *parts: kernel.tangent(*parts))
backward_p = _primitive("backward", lambda kernel, *parts: kernel.backward(*parts))


# ---------------------------------------------------------------- derivatives


def _forward_jvp(
    primals: Any, tangents: Any, *, kernel: Pair, tree: Any, mapped: Mapped
) -> tuple[list[Any], list[Any]]:
    kernel = Pair(kernel.differentiated, kernel.differentiated)
    out, lse = forward_p.bind(*primals, kernel=kernel, tree=tree, mapped=mapped)
    result = Result(checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse"))
    places = _places(tree)
    moving = [n for n in jax.tree.leaves(places[0]) if type(tangents[n]) is not ad.Zero]
    if not moving:
        return list(result), [*map(jnp.zeros_like, result)]
    arrays = [*primals]
    for n, x in zip(jax.tree.leaves(places[2]), result, strict=True):
        arrays[n] = x
    parts = jax.tree.unflatten(tree, arrays)
    along = Operands(*(tangents[n] if n in moving else None for n in places[0]))
    leaves, grown = jax.tree.flatten((*parts, along))
    mapped = tuple((*axes, *[axes[n] for n in moving]) for axes in mapped)
    return list(result), tangent_p.bind(*leaves, kernel=kernel.differentiated, tree=grown, mapped=mapped)


def _transpose(cotangents: Any, *arrays: Any, kernel: Kernel, tree: Any, mapped: Mapped) -> list[Any]:
    """Reverse mode: the kernel's `backward`."""
    parts, along = jax.tree.unflatten(tree, arrays)[:3], _places(tree)[3]
    start = tree.num_leaves - len(jax.tree.leaves(along))
    wanted = [n for n in jax.tree.leaves(along) if ad.is_undefined_primal(arrays[n])]
    zeros = {n: ad.instantiate_zeros(ad.Zero(arrays[n].aval)) for n in wanted}
    like = Operands(*(zeros.get(n) for n in along))
    pulled = Result(*map(ad.instantiate_zeros, cotangents))
    leaves, turned = jax.tree.flatten((*parts, pulled, like))
    axes = tuple((*each[:start], *[True] * (len(leaves) - start)) for each in mapped)
    grads = dict(zip(wanted, backward_p.bind(*leaves, kernel=kernel, tree=turned, mapped=axes), strict=True))
    return [grads.get(n) for n in range(len(arrays))]


def _transpose_back(cotangents: Any, *arrays: Any, kernel: Kernel, tree: Any, mapped: Mapped) -> list[Any]:
    """`backward` is linear in its cotangents, and its transpose is `tangent` again."""
    parts, places = jax.tree.unflatten(tree, arrays)[:3], _places(tree)
    pulled = iter(map(ad.instantiate_zeros, cotangents))
    along = Operands(*(None if n is None else next(pulled) for n in places[4]))
    leaves, turned = jax.tree.flatten((*parts, along))
    start = min(jax.tree.leaves(places[3]))
    axes = tuple((*each[:start], *[True] * (len(leaves) - start)) for each in mapped)
    moved = tangent_p.bind(*leaves, kernel=kernel, tree=turned, mapped=axes)
    found = dict(zip(jax.tree.leaves(places[3]), moved, strict=True))
    return [found[n] if n in found and ad.is_undefined_primal(x) else None for n, x in enumerate(arrays)]


def _second(primals: Any, tangents: Any, primitive: Primitive, again: Any, **static: Any) -> Any:
    """The derivative of `tangent_p` and `backward_p`: of `again`, code that does the same."""
    tree, out = static["tree"], primitive.bind(*primals, **static)
    linear = jax.tree.leaves(_places(tree)[3])
    moving = [n for n, x in enumerate(tangents) if type(x) is not ad.Zero]
    if set(moving) <= set(linear):
        arrays = [ad.instantiate_zeros(x) if n in linear else primals[n] for n, x in enumerate(tangents)]
        return out, primitive.bind(*arrays, **static)

    def code(*values: Any) -> list[Any]:
        arrays = list(primals)
        for n, value in zip(moving, values, strict=True):
            arrays[n] = value
        return _over_mapped(lambda *arrays: jax.tree.leaves(again(*arrays)), static["mapped"])(*arrays)

    along = jax.jvp(code, [primals[n] for n in moving], [tangents[n] for n in moving])[1]
    operands, setting, *_ = jax.tree.unflatten(tree, primals)
    return out, slabs.marked(along, out, operands, setting)


def _tangent_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    def again(*arrays: Any) -> Result:
        run = on_automatic_axes(slabs.tangent, lambda *specs: specs[LIKE["tangent"]])
        return run(*jax.tree.unflatten(static["tree"], arrays))

    return _second(primals, tangents, tangent_p, again, **static)


def _backward_jvp(primals: Any, tangents: Any, **static: Any) -> Any:
    def again(*arrays: Any) -> Operands:
        run = on_automatic_axes(slabs.backward, lambda *specs: specs[LIKE["backward"]])
        return run(*jax.tree.unflatten(static["tree"], arrays))

    return _second(primals, tangents, backward_p, again, **static)


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _transpose
ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[backward_p] = _transpose_back
