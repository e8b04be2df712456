"""What a kernel is given: the operands that have gradients, and the setting that has none.

Everything is resolved at the public door, so that no kernel meets a None option, a wrong rank or a foreign dtype.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from ..masks import Full, Mask
from ..sides import Plane, Side


class Operands(NamedTuple):
    """The arrays that attention is differentiated by; the same shape holds their tangents and cotangents.

    Attributes:
        q: `(..., H, T, D)`.
        k: `(..., K, S, D)`; batch axes as in q, or all 1.
        v: `(..., K, S, V)`, likewise.
        bias: broadcastable to the logits with all their axes, or None.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None


class Result(NamedTuple):
    """`out (..., H, T, V)` and `lse (..., H, T)`, both in the computing dtype; tangents and cotangents look alike."""

    out: Any
    lse: Any


class Dropping(NamedTuple):
    """Which weights are dropped: the words of a random key and the rate. Scaling by 1/(1-rate) is done outside."""

    seed: UInt32[Array, " words"]
    rate: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Setting:
    """All else that decides the answer.

    Attributes:
        mask: which pairs are allowed.
        q_positions, kv_positions: int32, `(T,)` or batch axes + `(T,)`; None: they count from 0.
        dropping: None, or what to drop.
        scale: factor of the products q·k.
        precision: of the products, as `jax.lax.dot_general` takes it.
        first: the row of the call's arrays where the queries at hand start; None: they are all of the call's.
        clean: no NaN or inf stands where it might be hidden, so that products need not look for it.
    """

    mask: Mask
    q_positions: Any
    kv_positions: Any
    dropping: Dropping | None
    scale: float = dataclasses.field(metadata={"static": True})
    precision: Any = dataclasses.field(metadata={"static": True})
    first: Any = None
    clean: bool = dataclasses.field(default=False, metadata={"static": True})

    def plane(self, operands: Operands) -> Plane:
        """The plane of the logits."""
        shape = (*operands.q.shape[:-1], operands.k.shape[-2])
        return Plane(shape, self.q_positions, self.kv_positions)

    def sides(self, operands: Operands) -> tuple[Side, Side]:
        """Both sides of the queries and keys at hand, as one tile."""
        plane = self.plane(operands)
        return plane.tile(0 if self.first is None else self.first, plane.queries, 0, plane.keys)

    def hides(self, operands: Operands) -> bool:
        """Whether any pair may be hidden."""
        return operands.bias is not None or self.masks

    def guards(self, operands: Operands) -> bool:
        """Whether products must keep out the NaN and inf of hidden pairs."""
        return self.hides(operands) and not self.clean

    @property
    def masks(self) -> bool:
        """Whether the mask may hide a pair."""
        return not isinstance(self.mask, Full)


def computing_dtype(operands: Operands) -> np.dtype:
    """The dtype of logits, softmax and sums: float32, or float64 where q, k or v has it."""
    wide = any(x.dtype == jnp.float64 for x in (operands.q, operands.k, operands.v))
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def matmul_precision() -> Any:
    """The precision that the caller has configured; or else float32 means float32 products on every platform.

    It is read once, so that derivatives taken outside the caller's `with` have the precision of the call.
    """
    configured = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return configured or lax.Precision.HIGHEST


class Cost(NamedTuple):
    """What a call costs, forward and for the gradient (forward and backward together).

    Attributes:
        flops: products counted as two each, exponentials as one.
        gradient_flops: likewise, with the backward pass.
        peak_bytes: largest sum of temporaries that live at once, without arguments and outputs.
        gradient_peak_bytes: likewise, with the backward pass.
        tiles: how many tiles are computed, of how many; None where there are none. What only values can tell counts as
            computed.
    """

    flops: int
    gradient_flops: int
    peak_bytes: int
    gradient_peak_bytes: int
    tiles: tuple[int, int] | None = None


def flops_of(pairs: int, operands: Operands) -> tuple[int, int]:
    """FLOPs of so many pairs, forward and for the gradient."""
    width, value_width = operands.q.shape[-1], operands.v.shape[-1]
    forward = pairs * (2 * (width + value_width) + 1)
    return forward, forward + pairs * (2 * (3 * width + 2 * value_width) + 1)
