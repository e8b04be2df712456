"""Flax (NNX) layers around the pure functions: a layer owns parameters and calls, and does no maths of its own.

`attention_fn`, the drop-in for Flax's own attention layers, is at home in `drop_in` and named here too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from . import recurrent
from .drop_in import attention_fn as attention_fn
from .errors import explain
from .given import AnyArray
from .masks import Mask
from .multihead import init_mha, mha
from .rotary import Rotary


class MultiHeadAttention(nnx.Module):
    """`mha` with parameters of its own: self-attention of x, or cross-attention from x to a context.

    Attributes:
        params: those of `mha` by name: `q` (W, H, D), `k` (C, K, D), `v` (C, K, V), `out` (H, V, O), and biases.
        deterministic: True switches dropout off; `eval()` and `train()` of any module around it set it.

    Example:
        >>> from attention_jax.masks import Causal
        >>> layer = MultiHeadAttention(16, heads=4, kv_heads=2, mask=Causal(), rotary=Rotary(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 16))).shape, layer.params["k"].shape
        ((2, 5, 16), (16, 2, 4))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        key_width: int | None = None,
        value_width: int | None = None,
        context_width: int | None = None,
        out_width: int | None = None,
        bias: bool = False,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters.

        Args:
            width, heads, kv_heads, key_width, value_width, context_width, out_width, bias, dtype: as in `init_mha`.
            mask: holds in every call; a mask given to the call narrows it further. It may not hold arrays.
            rotary: rotary positions for queries and keys.
            dropout: probability of dropping a weight; each call draws a key from the stream "dropout".
            rngs: streams "params" and, with dropout, "dropout".
        """
        if not 0 <= dropout <= 1:
            raise ValueError(explain("MultiHeadAttention", "dropout is a probability.", {"dropout": dropout}))
        if jax.tree.leaves(mask):
            remedy = "Give a mask with arrays to the call."
            raise ValueError(
                explain("MultiHeadAttention", "the layer's mask may not hold arrays.", {"mask": mask}, remedy)
            )
        widths = {"kv_heads": kv_heads, "key_width": key_width, "value_width": value_width}
        widths |= {"context_width": context_width, "out_width": out_width}
        params = init_mha(rngs.params(), width, heads, **widths, bias=bias, dtype=dtype)
        self.params = nnx.data(jax.tree.map(nnx.Param, params))
        self.mask = nnx.static(mask)
        self.rotary = nnx.static(rotary)
        self.dropout = dropout
        self.deterministic = False
        self.rngs = rngs.dropout.fork() if dropout else nnx.data(None)

    def __call__(
        self,
        x: Float[AnyArray, "*B T W"],
        context: Float[AnyArray, "*B S C"] | None = None,
        mask: Mask | Bool[AnyArray, "..."] | None = None,
        *,
        q_positions: int | Int[AnyArray, "..."] | None = None,
        kv_positions: int | Int[AnyArray, "..."] | None = None,
    ) -> Float[Array, "*B T O"]:
        """Attends from x to the context, or to x itself; arguments as in `mha`."""
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        dropout = None if self.deterministic or self.rngs is None else (self.dropout, self.rngs())
        return mha(
            _values(self.params),
            x,
            context,
            mask,
            rotary=self.rotary,
            dropout=dropout,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )


class Recurrence(nnx.Module):
    """A recurrent cell scanned over time, and a projection of its state back to the width of the model.

    Attributes:
        params: those of the cell, as `recurrent` names them.
        cell: its name, a key of `recurrent.CELLS`.

    Example:
        >>> layer = Recurrence(16, state=24, cell="gru", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    def __init__(self, width: int, state: int, cell: str = "gru", *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        """Draws the parameters of a cell whose state has `state` numbers, for inputs and outputs of `width`."""
        if cell not in recurrent.CELLS:
            facts = {"cell": cell, "known": ", ".join(recurrent.CELLS)}
            raise ValueError(explain("Recurrence", "unknown cell.", facts))
        self.cell = cell
        self.params = nnx.data(jax.tree.map(nnx.Param, recurrent.CELLS[cell].init(rngs.params(), width, state, dtype)))
        self.out = nnx.Linear(state, width, use_bias=False, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[AnyArray, "*B T W"]) -> Float[Array, "*B T W"]:
        """Runs over x from a state of zeros."""
        _, states = recurrent.unroll(recurrent.CELLS[self.cell], _values(self.params), x)
        return self.out(states)


class Block(nnx.Module):
    """Pre-norm: x + mixer(norm(x)), then x + mlp(norm(x)). Tokens meet in the mixer only.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> Block(Recurrence(16, state=8, rngs=rngs), 16, hidden=32, rngs=rngs)(jnp.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    def __init__(self, mixer: nnx.Module, width: int, hidden: int, *, dropout: float = 0.0, rngs: nnx.Rngs):
        """Takes any mixer from (..., T, W) to (..., T, W); `dropout` is on both branches."""
        self.mixer = mixer
        self.before_mixer = nnx.RMSNorm(width, rngs=rngs)
        self.before_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, hidden, rngs=rngs)
        self.narrow = nnx.Linear(hidden, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)

    def __call__(self, x: Float[Array, "*B T W"]) -> Float[Array, "*B T W"]:
        """Mixes along T, then transforms each token by itself."""
        x = x + self.dropout(self.mixer(self.before_mixer(x)))
        return x + self.dropout(self.narrow(jax.nn.gelu(self.widen(self.before_mlp(x)))))


def _values(params: PyTree) -> PyTree:
    return jax.tree.map(lambda param: param[...], params, is_leaf=lambda node: isinstance(node, nnx.Variable))
