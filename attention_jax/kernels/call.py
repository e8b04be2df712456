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
from ..sides import Plane


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
    """

    mask: Mask
    q_positions: Any
    kv_positions: Any
    dropping: Dropping | None
    scale: float = dataclasses.field(metadata={"static": True})
    precision: Any = dataclasses.field(metadata={"static": True})

    def plane(self, operands: Operands) -> Plane:
        """The plane of the logits."""
        shape = (*operands.q.shape[:-1], operands.k.shape[-2])
        return Plane(shape, self.q_positions, self.kv_positions)

    def hides(self, operands: Operands) -> bool:
        """Whether any pair may be hidden."""
        return operands.bias is not None or not isinstance(self.mask, Full)


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
    """

    flops: int
    gradient_flops: int
    peak_bytes: int
    gradient_peak_bytes: int
