"""Mesh axes: how a kernel's code meets arrays that are sharded, whichever way JAX is told about it.

- Automatic axes (plain `jit`): nothing to do.
- Explicit axes (the default of `jax.make_mesh`): the kernel's own code runs with these axes automatic, and its results
  are given the sharding of what they resemble.
- Manual axes (`shard_map`): every array must vary over the same axes; those that vary over fewer are cast.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, PartitionSpec


def on_automatic_axes(fn: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, run with explicit mesh axes made automatic.

    Args:
        fn: a function of pytrees of arrays.
        like: the partition specs of its results, from the specs of the same arguments.
    """

    def run(*args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = tuple(str(name) for name, kind in kinds if kind == AxisType.Explicit)
        if not explicit:
            return fn(*args)
        return jax.sharding.auto_axes(fn, axes=explicit, out_sharding=like(*jax.tree.map(_spec, args)))(*args)

    return run


def _spec(x: Any) -> PartitionSpec:
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *[None] * (jax.typeof(x).ndim - len(spec)))


def on_same_manual_axes(tree: Any) -> Any:
    """Every array of the tree varying over the mesh axes that any of them varies over, inside `shard_map`."""
    leaves, structure = jax.tree.flatten(tree)
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return tree  # inside `shard_map` all arrays are traced
    axes = [_varying(leaf) for leaf in leaves]
    union = frozenset[str]().union(*axes)
    cast = [
        leaf if has == union else lax.pcast(leaf, tuple(sorted(union - has)), to="varying")
        for leaf, has in zip(leaves, axes, strict=True)
    ]
    return jax.tree.unflatten(structure, cast)


def _varying(leaf: Any) -> frozenset[str]:
    return getattr(getattr(jax.typeof(leaf), "manual_axis_type", None), "varying", frozenset())
