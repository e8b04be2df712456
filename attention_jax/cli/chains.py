"""How many steps of a computation must wait for each other, read off its jaxpr.

A *step* is one equation that computes new numbers: a product, a sum over an axis, an exponential. Moving numbers
(reshape, slice, transpose, change of dtype) counts 0, and a matrix product or a sum counts 1 whatever its size,
since the additions inside it need no particular order. The chain is the longest path of such steps from the inputs
to the outputs: what is left to wait for when everything that could run side by side does. It is a property of the
algorithm and knows nothing of the device.

Calls are looked into; of the branches of a `cond` the longest counts. A `scan` is walked once per trip: what an
iteration does before it needs the carry (a projection of its own inputs) starts at once in all of them, and only what
hangs on the carry adds up. So a map counts its body once, a recurrence counts T times what lies between one carry
and the next. A `while` is treated so where its number of trips can be read off (a counter with a known start, step and
bound); else it is walked once and the chain is marked as a lower bound. That mark also meets primitives that hold
code of a kind not known here, and those that are neither JAX's nor ours, whose code the jaxpr does not show.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, primitives

from ..kernels.rules import code_of

_MOVING = """
bitcast_convert_type broadcast broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice
dynamic_update_slice expand_dims gather iota mesh_cast name optimization_barrier pad pvary reduce_precision reshape rev
sharding_constraint slice split squeeze stop_gradient transpose
"""
MOVES = frozenset(_MOVING.split())
CALLS = {  # primitives that run the code they hold once, in place
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "call_jaxpr",
    "shard_map": "jaxpr",
}
KNOWN = {each.name for each in vars(primitives).values() if isinstance(each, Primitive)} | MOVES


@dataclasses.dataclass(frozen=True)
class Chain:
    """Length of the longest chain; `exact` is False where it is only a lower bound."""

    steps: int
    exact: bool


def longest_chain(fn: Callable[..., Any], *args: Any) -> Chain:
    """The longest chain of dependent steps of `fn(*args)`; nothing is computed.

    Args:
        fn: any function that JAX can trace.
        args: its arguments, or `jax.ShapeDtypeStruct`s that stand for them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> longest_chain(lambda x: jnp.exp(x) + jnp.sin(jnp.cos(x)), 1.0)
        Chain(steps=3, exact=True)
        >>> longest_chain(lambda x: jax.lax.scan(lambda h, _: (jnp.sin(h), None), x, length=50), 1.0).steps
        50
    """
    closed = jax.make_jaxpr(fn)(*args)
    walk = _Walk()
    return Chain(max(walk.jaxpr(closed.jaxpr, [0] * len(closed.jaxpr.invars)), default=0), walk.exact)


class _Walk:
    """Depths of values, equation by equation; remembers whether it met code that it cannot count."""

    def __init__(self) -> None:
        self.exact = True

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
        """Depths of the outputs, given those of the inputs."""
        depth: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> int:
            return 0 if isinstance(atom, Literal) else depth.get(atom, 0)  # constants are there from the start

        for eqn in jaxpr.eqns:
            depth.update(zip(eqn.outvars, self.equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: list[int]) -> list[int]:
        """Depths of what one equation gives."""
        name = eqn.primitive.name
        if name == "scan":
            return self.scan(eqn, inputs)
        if name == "while":
            return self.loop(eqn, inputs)
        if name == "cond":
            branches = [self.jaxpr(_open(each), inputs[1:]) for each in eqn.params["branches"]]
            return [max(inputs[0], *depths) for depths in zip(*branches, strict=True)]
        if name in CALLS and CALLS[name] in eqn.params:
            return self.jaxpr(_open(eqn.params[CALLS[name]]), inputs)
        if (code := code_of(eqn)) is not None:
            return self.jaxpr(code, inputs)
        held = [_open(each) for each in eqn.params.values() if isinstance(each, ClosedJaxpr | Jaxpr)]
        if name not in KNOWN or any(inner.eqns and not _is_monoid(name) for inner in held):
            self.exact = False
        return [max(inputs, default=0) + (name not in MOVES)] * len(eqn.outvars)

    def scan(self, eqn: Any, inputs: list[int]) -> list[int]:
        """One walk of the body per trip. Outputs that are not carried are stacked: one more axis than in the body."""
        body = _open(eqn.params["jaxpr"])
        carried = sum(_rank(outer) == _rank(inner) for outer, inner in zip(eqn.outvars, body.outvars, strict=True))
        mapped = sum(_rank(outer) != _rank(inner) for outer, inner in zip(eqn.invars, body.invars, strict=True))
        constants = len(inputs) - carried - mapped
        carry, stacked = inputs[constants : constants + carried], [0] * (len(eqn.outvars) - carried)
        for _ in range(eqn.params["length"]):
            out = self.jaxpr(body, [*inputs[:constants], *carry, *inputs[constants + carried :]])
            carry, stacked = out[:carried], [max(pair) for pair in zip(stacked, out[carried:], strict=True)]
        return [*carry, *stacked]

    def loop(self, eqn: Any, inputs: list[int]) -> list[int]:
        """Like a scan whose values are all carried, where the number of trips is known."""
        condition, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
        skipped = eqn.params["cond_nconsts"]
        constants = inputs[skipped : skipped + eqn.params["body_nconsts"]]
        carry = inputs[skipped + len(constants) :]
        trips = _trips(condition, body, skipped, len(constants), eqn.invars)
        if trips is None:
            self.exact = False
        for _ in range(1 if trips is None else trips):
            carry = self.jaxpr(body, [*constants, *carry])
        return carry


def _trips(condition: Jaxpr, body: Jaxpr, skipped: int, constants: int, outer: Sequence[Any]) -> int | None:
    """Trips of `while counter < bound: counter += step`, where start, bound and step are literals; else None."""
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    counter, bound = condition.eqns[0].invars
    if counter not in condition.invars[skipped:]:
        return None
    place = condition.invars.index(counter) - skipped
    start = outer[skipped + constants + place]
    if not isinstance(bound, Literal) and bound in condition.invars[skipped:]:  # carried along: must stay as it is
        other = condition.invars.index(bound) - skipped
        same = body.outvars[other] is body.invars[constants + other]
        bound = outer[skipped + constants + other] if same else bound
    step = _added(body, body.invars[constants + place], body.outvars[place])
    if step is None or not isinstance(start, Literal) or not isinstance(bound, Literal):
        return None
    return max(0, math.ceil((float(bound.val) - float(start.val)) / step))


def _added(body: Jaxpr, before: Any, after: Any) -> float | None:
    """The positive literal that `after = before + literal` adds, else None."""
    for eqn in body.eqns:
        if after in eqn.outvars and eqn.primitive.name == "add":
            literals = [float(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
            if len(literals) == 1 and literals[0] > 0 and any(atom is before for atom in eqn.invars):
                return literals[0]
    return None


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _rank(atom: Any) -> int:
    return len(atom.aval.shape)


def _is_monoid(name: str) -> bool:
    """Whether the code a primitive holds only says how two numbers are joined (a sum, a scatter, a sort)."""
    return name.startswith(("reduce", "scatter", "argm", "sort", "cum", "select_and"))
