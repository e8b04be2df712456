"""Small immutable expressions whose Python numbers are static and whose arrays are leaves of a JAX pytree.

Masks are made of these. An expression can be passed through `jit`, `vmap` and `scan`, compared, hashed and read back.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from .given import is_concrete


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Expression:
    """Base of the nodes of an expression. A subclass is a frozen dataclass; every subclass becomes a pytree."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_node(cls, _flatten, lambda aux, children: _unflatten(cls, aux, children))

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        shown = [f"{name}={show(value)}" for name, value, default in fields if value is not default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        (mine, tree), (theirs, other_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        return tree == other_tree and all(map(_same, mine, theirs))

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))


def _leaves(node: Expression) -> tuple[str, ...]:
    """Names of the fields that are leaves: by their values, or as it was when JAX took the node apart.

    JAX puts other things in the place of leaves (axes for `vmap`, placeholders); they stay leaves.
    """
    values = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    return getattr(node, "_unflattened", None) or tuple(name for name, value in values if not _is_static(value))


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or callable(value)


def _flatten(node: Expression) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves = _leaves(node)
    values = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    static = tuple((name, value) for name, value in values.items() if name not in leaves)
    return tuple(values[name] for name in leaves), (leaves, static)


def _unflatten(cls: type, structure: tuple[Any, ...], children: tuple[Any, ...]) -> Any:
    node, (leaves, static) = object.__new__(cls), structure  # no constructor: the children may be placeholders
    for name, value in (*static, *zip(leaves, children, strict=True), ("_unflattened", leaves)):
        object.__setattr__(node, name, value)
    return node


def _same(a: Any, b: Any) -> bool:
    return a is b or (is_concrete(a) and is_concrete(b) and np.array_equal(a, b))


def show(value: Any) -> str:
    """A field as its expression reads: small NumPy arrays by value, others by dtype and shape."""
    if isinstance(value, tuple):
        return "(" + "".join(f"{show(item)}, " for item in value).strip() + ")"
    if isinstance(value, np.ndarray) and value.size <= 8:
        return f"array({value.tolist()})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", repr(value)) if callable(value) else repr(value)
