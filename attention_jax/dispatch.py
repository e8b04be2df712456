"""`attention` and `plan`: the arguments are checked, a kernel is chosen, and `plan` says why.

| letter | axis                                     | word     | always means                                  |
|--------|------------------------------------------|----------|-----------------------------------------------|
| B      | batch (any number of leading axes)       | mask     | booleans, True = may attend                   |
| H      | query heads                              | bias     | floats added to the logits                    |
| K      | key/value heads (H is a multiple of K)   | logits   | scaled scores before the softmax              |
| T      | queries                                  | weights  | after the softmax                             |
| S      | keys                                     | tile     | a rectangle of queries × keys                 |
| D      | width of a query or key (d_k)            | position | where a token stands in its sequence          |
| V      | width of a value (d_v)                   | lse      | log-sum-exp of a row's logits                 |
| W      | width of the model                       | step     | one recurrent step; unroll: the scan over time|
| N      | width of a recurrent state               | plan     | what will run, and why                        |
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from .arguments import Resolved, resolve
from .errors import explain
from .given import AnyArray
from .kernels import KERNELS
from .kernels.call import Operands, Setting, computing_dtype
from .kernels.dense import Dense
from .kernels.rules import Pair, attend, weights_of
from .mask_algebra import Mask
from .plans import Plan


def attention(
    q: Float[AnyArray, "*batch T D"],
    k: Float[AnyArray, "*shared S D"],
    v: Float[AnyArray, "*shared S V"],
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    scale: float | Float[AnyArray, "..."] | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    dropout: tuple[Any, Any] | None = None,
    q_positions: int | Int[AnyArray, "..."] | None = None,
    kv_positions: int | Int[AnyArray, "..."] | None = None,
    implementation: str | tuple[str, ...] = "auto",
    return_lse: bool = False,
    return_weights: bool = False,
) -> Any:
    """Scaled dot-product attention: softmax(q kᵀ · scale + bias, over the keys that the mask allows) v.

    The order is fixed: scale, bias, mask, softmax, dropout, values. A query that may attend to nothing gives zeros
    (weights 0, lse -inf) and passes no gradient. NaN or inf in a key or value reaches exactly the queries that may
    attend to it. Any derivative of any order works, forwards and backwards; what reverse mode keeps is (q, k, v, out,
    lse), linear in T, besides the bias and the mask that it was given.

    Args:
        q: queries `(..., H, T, D)`. `(T, D)` is one head, `(H, T, D)` heads without a batch.
        k: keys `(..., K, S, D)`; query head h reads key/value head h // (H // K). Batch axes as in q, or all 1.
        v: values `(..., K, S, V)`.
        mask: a `Mask`, or booleans where True = may attend: two axes `(T|1, S|1)`, or all axes of the logits
            `(..., H, T, S)` with 1 where it broadcasts. None: everything.
        scale: factor of the products, 1/√D by default. An array, 0-d or with all axes `(..., H|1, T|1, 1)`, has a
            gradient.
        bias: floats added to the logits, shaped like a boolean mask; -inf hides a pair.
        dropout: `(rate, key)`: weights are dropped with probability `rate` and the rest scaled by 1/(1-rate). Which
            ones depends on the key and on the weight's place in the arrays of this call alone.
        q_positions: where the queries stand: the first one's position, `(T,)`, or batch axes + `(T,)`; from 0 by
            default. Needed where the mask compares positions and T ≠ S.
        kv_positions: likewise for keys; only together with `q_positions`.
        implementation: "auto", the name of a kernel, or names in order of preference.
        return_lse: also give the log-sum-exp of each row's logits, `(..., H, T)`.
        return_weights: also give the weights after the softmax and before dropout, `(..., H, T, S)`.

    Returns:
        out `(..., H, T, V)` in the dtype of q; or (out, lse), (out, weights), (out, lse, weights). Logits, softmax and
        sums, lse and weights are float32, or float64 where q, k or v is.

    Raises:
        TypeError: for lists, integer arrays, and masks that are not boolean.
        ValueError: for shapes that do not fit, positions left open, unknown implementations; the message names the
            rule, the shapes and the remedy.

    Cost: O(T · S · (D + V)) time, less what a mask lets skip; memory O(T + S), or at most 16 MiB of logits.

    Example:
        >>> import jax, attention_jax as aj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 16, 8))
        >>> aj.attention(q, k, v, aj.Causal()).shape
        (2, 4, 16, 8)

    References:
        Vaswani et al., Attention Is All You Need, 2017.
    """
    call = resolve(
        q, k, v, mask, scale=scale, bias=bias, dropout=dropout, q_positions=q_positions, kv_positions=kv_positions
    )
    names = choose(implementation, call, return_lse, return_weights)[0]
    out, lse, weights = _run(
        call.operands, call.setting, call.grown, names, call.headless, jnp.dtype(q.dtype), return_weights
    )
    extras = ([lse] if return_lse else []) + ([weights] if return_weights else [])
    return (out, *extras) if extras else out


def plan(
    q: Any,
    k: Any,
    v: Any,
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    scale: Any = None,
    bias: Any = None,
    dropout: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    implementation: str | tuple[str, ...] = "auto",
    return_lse: bool = False,
    return_weights: bool = False,
) -> Plan:
    """What `attention` would run for the same arguments, and why; nothing is computed.

    Args:
        q, k, v: arrays, or `jax.ShapeDtypeStruct` in their place.
        mask, scale, bias, dropout, q_positions, kv_positions, implementation, return_lse, return_weights: as in
            `attention`.

    Returns:
        The choice, the reason each other kernel was not chosen, FLOPs and predicted peak bytes; a table when printed.

    Raises:
        TypeError, ValueError: what `attention` raises.

    Example:
        >>> import jax, jax.numpy as jnp, attention_jax as aj
        >>> q = jax.ShapeDtypeStruct((1, 8, 1024, 64), jnp.float32)
        >>> aj.plan(q, q, q, aj.Causal()).implementation
        'tiled'
    """
    found: list[Plan] = []

    def trace(q: Any, k: Any, v: Any) -> None:
        where = {"q_positions": q_positions, "kv_positions": kv_positions}
        call = resolve(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **where)
        names, refused = choose(implementation, call, return_lse, return_weights)
        operands = Operands(*(None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.operands))
        alone, differentiated = (KERNELS[name].cost(operands, call.setting) for name in names)
        gradient = differentiated.gradient_flops, differentiated.gradient_peak_bytes
        cost = alone._replace(gradient_flops=gradient[0], gradient_peak_bytes=gradient[1])
        found.append(Plan(*names, refused, operands, cost))

    jax.eval_shape(trace, q, k, v)
    return found[0]


# The largest logits, in bytes, for which one product of everything beats tiles; and those for which a forward pass
# alone does, where the compiler makes one loop of it.
# Measured on a CPU by `python benchmarks/crossover.py`; no other platform has been measured, so the same serves there.
DENSE_UP_TO = 2 * 2**20
DENSE_ALONE_UP_TO = 16 * 2**20


def choose(
    implementation: str | tuple[str, ...], call: Resolved, lse: bool, weights: bool
) -> tuple[tuple[str, str], dict[str, str]]:
    """The kernels that run, undifferentiated and differentiated, and why each other than the first does not.

    Raises:
        ValueError: for unknown names, or where no kernel that was named can do the call.
    """
    names = (implementation,) if isinstance(implementation, str) else implementation
    known = ", ".join(map(repr, ("auto", *KERNELS)))
    if not isinstance(names, (tuple, list)) or not names:
        rule = "implementation must be a name, or names in order of preference."
        raise ValueError(explain("attention", rule, {"given": repr(implementation), "known": known}))
    if unknown := [name for name in names if name not in ("auto", *KERNELS)]:
        raise ValueError(explain("attention", f"unknown implementation {unknown[0]!r}.", {"known": known}))
    refused = {name: why for name, kernel in KERNELS.items() if (why := kernel.refuses(weights))}
    automatic, reason = _quickest(call, lse)
    able = [
        [name for choice in names for name in (quick if choice == "auto" else [choice]) if name not in refused]
        for quick in automatic
    ]
    if not able[0]:
        raise ValueError(explain("attention", "no implementation that was named can do this.", refused))
    alone, differentiated = (each[0] for each in able)
    others = dict.fromkeys(KERNELS, reason if names[0] == "auto" else f"{alone} comes first")
    return (alone, differentiated), {name: why for name, why in (others | refused).items() if name != alone}


def _quickest(call: Resolved, lse: bool) -> tuple[list[list[str]], str]:
    """Kernels from the quickest on, undifferentiated and differentiated, and what speaks for these orders."""
    dense, tiled = ["dense", "tiled"], ["tiled", "dense"]
    size = math.prod(call.setting.plane(call.operands).shape) * computing_dtype(call.operands).itemsize
    if not isinstance(size, int):
        return [tiled, tiled], "logits of any size; tiles need no room for them"
    differentiated = dense if size <= DENSE_UP_TO else tiled
    in_one_loop = not lse and Dense().in_one_loop(call.operands, call.setting)
    alone = dense if in_one_loop and size <= DENSE_ALONE_UP_TO else differentiated
    reason = f"logits of {size / 2**20:.2g} MiB: {alone[0]} is quicker"
    return [alone, differentiated], reason + ("" if alone == differentiated else " undifferentiated, tiled otherwise")


@functools.partial(jax.jit, static_argnames=("names", "headless", "dtype", "with_weights"))
def _run(
    operands: Operands,
    setting: Setting,
    grown: Any,
    names: tuple[str, str],
    headless: bool,
    dtype: Any,
    with_weights: bool,
) -> tuple[Any, Any, Any]:
    kernels = Pair(*(KERNELS[name] for name in names))
    out, lse = attend(kernels, operands, setting)
    weights = weights_of(kernels.alone, operands, setting, lse) if with_weights else None
    if grown is not None:
        out = out * grown.astype(out.dtype)
    out = out.astype(dtype)
    return jax.tree.map(lambda x: x[0], (out, lse, weights)) if headless else (out, lse, weights)
