"""Multi-head attention: projections around `attention`, as a pure function of a pytree of parameters.

| parameter | shape       | | parameter  | shape    |
|-----------|-------------|-|------------|----------|
| `q`       | `(W, H, D)` | | `q_bias`   | `(H, D)` |
| `k`       | `(C, K, D)` | | `k_bias`   | `(K, D)` |
| `v`       | `(C, K, V)` | | `v_bias`   | `(K, V)` |
| `out`     | `(H, V, O)` | | `out_bias` | `(O,)`   |

W is the width of the model, C that of the context, O that of the output; the other letters are those of `attention`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from .dispatch import attention
from .errors import explain
from .given import AnyArray, promoted
from .kernels.call import matmul_precision
from .mask_algebra import Mask
from .rotary import Rotary, rotate

AXES = {"q": "WHD", "k": "CKD", "v": "CKV", "out": "HVO"}
BIAS_AXES = {"q_bias": "HD", "k_bias": "KD", "v_bias": "KV", "out_bias": "O"}


def init_mha(
    key: Key[Array, ""],
    width: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    key_width: int | None = None,
    value_width: int | None = None,
    context_width: int | None = None,
    out_width: int | None = None,
    bias: bool = False,
    dtype: Any = jnp.float32,
) -> dict[str, Array]:
    """Parameters for `mha`: normal with variance 1 / fan-in, biases 0.

    Args:
        key: a random key.
        width: W, of the inputs.
        heads: H, of the queries.
        kv_heads: K, of keys and values; H is a multiple of it. H by default.
        key_width: D, of a query or key of one head; W / H by default.
        value_width: V, of a value of one head; D by default.
        context_width: C, of what keys and values are made from; W by default.
        out_width: O, of the output; W by default.
        bias: whether the four projections have one.
        dtype: of the parameters.

    Raises:
        ValueError: H does not divide W and no `key_width` is given, H is not a multiple of K, or a width below 1.

    Example:
        >>> {name: p.shape for name, p in init_mha(jax.random.key(0), width=32, heads=4, kv_heads=2).items()}
        {'q': (32, 4, 8), 'k': (32, 2, 8), 'v': (32, 2, 8), 'out': (4, 8, 32)}
    """
    if key_width is None and heads > 0 and width % heads:
        rule = "the width W must be a multiple of the heads H, or key_width given."
        raise ValueError(explain("init_mha", rule, {"width W": width, "heads H": heads}))
    kv_heads = heads if kv_heads is None else kv_heads
    key_width = width // max(heads, 1) if key_width is None else key_width
    sizes = {"W": width, "H": heads, "K": kv_heads, "D": key_width}
    sizes["V"] = key_width if value_width is None else value_width
    sizes["C"] = width if context_width is None else context_width
    sizes["O"] = width if out_width is None else out_width
    if min(sizes.values()) < 1:
        raise ValueError(explain("init_mha", "heads and widths are at least 1.", sizes))
    if heads % kv_heads:
        rule = "the query heads H must be a multiple of the key/value heads K."
        raise ValueError(explain("init_mha", rule, {"heads H": heads, "kv_heads K": kv_heads}))
    fan_in = {"q": width, "k": sizes["C"], "v": sizes["C"], "out": heads * sizes["V"]}
    params = {}
    for (name, axes), each in zip(AXES.items(), jax.random.split(key, len(AXES)), strict=True):
        drawn = jax.random.normal(each, tuple(sizes[letter] for letter in axes), dtype)
        params[name] = drawn * jnp.asarray(fan_in[name] ** -0.5, dtype)
    if bias:
        params |= {name: jnp.zeros([sizes[letter] for letter in axes], dtype) for name, axes in BIAS_AXES.items()}
    return params


def mha(
    params: Mapping[str, Float[AnyArray, "..."]],
    x: Float[AnyArray, "*B T W"],
    context: Float[AnyArray, "*B S C"] | None = None,
    mask: Mask | Bool[AnyArray, "..."] | None = None,
    *,
    rotary: Rotary | None = None,
    scale: float | Float[AnyArray, "..."] | None = None,
    bias: Float[AnyArray, "..."] | None = None,
    dropout: tuple[Any, Any] | None = None,
    q_positions: int | Int[AnyArray, "..."] | None = None,
    kv_positions: int | Int[AnyArray, "..."] | None = None,
    implementation: str | tuple[str, ...] = "auto",
    return_weights: bool = False,
) -> Any:
    """Multi-head attention: Σ over heads of attention(x Wq, c Wk, c Wv) Wo, where c is the context, or x itself.

    Without a context this is self-attention. "Self" says that queries, keys and values are made from the same source,
    not that a token attends to itself only: every token attends to every token of x that the mask allows. With a
    context it is cross-attention: queries from x, keys and values from the context.

    Args:
        params: by name, as `init_mha` makes them; which biases there are is read off the names.
        x: `(..., T, W)`.
        context: `(..., S, C)` with the batch axes of x; None: x, with S = T and C = W.
        mask: as in `attention`, over the logits `(..., H, T, S)`.
        rotary: turns queries and keys by their positions, `q_positions` and `kv_positions`.
        scale, bias, dropout, q_positions, kv_positions, implementation: as in `attention`; `bias` is added to the
            logits, it is not a bias of a projection.
        return_weights: also give the weights `(..., H, T, S)`.

    Returns:
        `(..., T, O)`, or (output, weights). Its dtype is that of x and the parameters promoted together; for mixed
        precision cast the parameters.

    Raises:
        TypeError, ValueError: for names and shapes that do not fit, rotary positions left open by T ≠ S, and what
            `attention` refuses.

    Example:
        >>> from attention_jax.masks import Causal
        >>> params = init_mha(jax.random.key(0), width=32, heads=4, kv_heads=2)
        >>> mha(params, jnp.ones((2, 10, 32)), mask=Causal(), rotary=Rotary()).shape
        (2, 10, 32)

    References:
        Vaswani et al., Attention Is All You Need, 2017. Ainslie et al., GQA, 2023 (grouped heads).
    """
    source = x if context is None else context
    _check(params, x, source)
    if rotary is not None and q_positions is None and x.shape[-2] != source.shape[-2]:
        rule = "rotary positions compare queries and keys, so with T ≠ S q_positions must be given."
        remedy = "q_positions=S - T: the last query stands at the last key; q_positions=0: both start together."
        raise ValueError(explain("mha", rule, {"queries T": x.shape[-2], "keys S": source.shape[-2]}, remedy))
    dtype = promoted(*(array.dtype for array in (x, source, *params.values())))
    cast = {name: jnp.asarray(param).astype(dtype) for name, param in params.items()}
    q = _project("q", cast, jnp.asarray(x).astype(dtype))
    k, v = (_project(name, cast, jnp.asarray(source).astype(dtype)) for name in ("k", "v"))
    if rotary is not None:
        q, k = rotate(q, q_positions, rotary), rotate(k, kv_positions, rotary)
    where = {"q_positions": q_positions, "kv_positions": kv_positions, "implementation": implementation}
    attended = attention(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, return_weights=return_weights, **where)
    heads, *weights = attended if return_weights else (attended,)
    out = jnp.einsum("...htv,hvo->...to", heads, cast["out"], precision=matmul_precision())
    if "out_bias" in cast:
        out = out + cast["out_bias"].reshape((1,) * (out.ndim - 1) + (-1,))
    return (out, *weights) if return_weights else out


def _project(name: str, params: dict[str, Array], x: Float[Array, "*B T n"]) -> Float[Array, "*B heads T m"]:
    heads = jnp.einsum("...tn,nhm->...htm", x, params[name], precision=matmul_precision())
    bias = params.get(f"{name}_bias")
    return heads if bias is None else heads + bias.reshape((1,) * (heads.ndim - 3) + (bias.shape[0], 1, -1))


def _check(params: Any, x: Any, source: Any) -> None:
    """Raises unless the parameters fit each other and the inputs."""
    if not isinstance(params, Mapping) or not set(AXES) <= set(params) <= {*AXES, *BIAS_AXES}:
        names = sorted(params) if isinstance(params, Mapping) else type(params).__name__
        known = ", ".join([*AXES, *BIAS_AXES])
        raise TypeError(explain("mha", "params must hold q, k, v and out.", {"given": names, "known": known}))
    arrays = {"x": x, "context": source, **params}
    for name, array in arrays.items():
        if not isinstance(array, (jax.Array, np.ndarray)) or not jnp.issubdtype(array.dtype, jnp.floating):
            given = getattr(array, "dtype", type(array).__name__)
            raise TypeError(explain("mha", f"{name} must be an array of floats.", {name: given}))
    facts = {
        f"{name} ({', '.join(axes)})": params[name].shape
        for name, axes in {**AXES, **BIAS_AXES}.items()
        if name in params
    }
    facts = {"x (..., T, W)": x.shape, "context (..., S, C)": source.shape} | facts
    if min(x.ndim, source.ndim) < 2:
        raise ValueError(explain("mha", "x and context have an axis of positions and one of features.", facts))
    sizes = {"W": x.shape[-1:], "C": source.shape[-1:]}
    for name, axes in {**AXES, **BIAS_AXES}.items():
        shape = params[name].shape if name in params else None
        if shape is not None and len(shape) != len(axes):
            raise ValueError(explain("mha", f"{name} must have the axes ({', '.join(axes)}).", facts))
        for letter, size in zip(axes, shape or (), strict=False):
            if sizes.setdefault(letter, (size,)) != (size,):
                raise ValueError(
                    explain(
                        "mha", f"the axis {letter} must have one length in x, the context and the parameters.", facts
                    )
                )
    if x.ndim != source.ndim or x.shape[:-2] != source.shape[:-2]:
        raise ValueError(explain("mha", "x and context must have the same batch axes.", facts))
