"""Small immutable expressions whose Python numbers are static and whose arrays are leaves of a JAX pytree.

Masks are made of these. An expression can be passed through `jit`, `vmap` and `scan`, compared, hashed and read back.
"""

import dataclasses
from typing import Any

import jax
import numpy as np


def is_concrete(value: Any) -> bool:
    """Whether a value can be read without stalling a device: Python's and NumPy's only."""
    return isinstance(value, (int, float, np.ndarray, np.generic))


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


_LEAF = "leaf"  # stands in the static part for a field that is a leaf


def _is_static(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float)) or callable(value)


def _flatten(node: Expression) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    values = [(field.name, getattr(node, field.name)) for field in dataclasses.fields(node)]
    children = tuple(value for _, value in values if not _is_static(value))
    return children, tuple((name, value if _is_static(value) else _LEAF) for name, value in values)


def _unflatten(cls: type, static: tuple[tuple[str, Any], ...], children: tuple[Any, ...]) -> Any:
    node, rest = object.__new__(cls), iter(children)  # no constructor: JAX also unflattens placeholders
    for name, value in static:
        object.__setattr__(node, name, next(rest) if value is _LEAF else value)
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
