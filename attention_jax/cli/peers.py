"""Attention as other libraries have it, each called at its best: its own layout, and its own flag for a causal mask.

A peer gets a mask of booleans only where it has no name for it. All take float32 or bfloat16 arrays that were laid out
for them before the time began.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import Causal, Segments, Window, attention
from ..mask_algebra import Mask
from .contest import Arrays, Entry, NotSupported, as_arrays, jitted
from .devices import cores

WINDOW = 256
SEGMENTS = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """What one contest is about.

    Attributes:
        mask: "full", "causal", "window" (each token sees itself and 255 before) or "segments" (8 packed texts, causal).
        direction: "forward", "forward and backward", or "not jitted", forward.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int
    mask: str
    direction: str = "forward"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """How tables call it: B×H×T×D and the mask."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}×{heads}×{self.length}×{self.width} {self.mask}"

    @property
    def inputs(self) -> tuple[np.ndarray, ...]:
        """q, k, v and the cotangent of the output, (B, H, T, D), float32."""
        draw = np.random.default_rng(0)
        sizes = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return tuple(draw.standard_normal((self.batch, n, self.length, self.width), np.float32) for n in sizes)

    @property
    def segment_ids(self) -> np.ndarray:
        """Packed texts of the same length, (B, T)."""
        ids = np.arange(self.length) * SEGMENTS // self.length
        return np.broadcast_to(ids.astype(np.int32), (self.batch, self.length))

    @property
    def visible(self) -> np.ndarray | None:
        """The mask as booleans, (B or 1, 1, T, T); None: everything."""
        place = np.arange(self.length)
        back = place[:, None] - place
        if self.mask == "full":
            return None
        if self.mask == "segments":
            ids = self.segment_ids
            return ((ids[:, :, None] == ids[:, None]) & (back >= 0))[:, None]
        return ((back >= 0) & (back < (WINDOW if self.mask == "window" else self.length)))[None, None]


Attend = Callable[..., jax.Array]


def mask_of(point: Point) -> Mask | None:
    """The mask of a point as this library has it."""
    ids = jnp.asarray(point.segment_ids)
    masks = {"full": None, "causal": Causal(), "window": Causal() & Window(left=WINDOW - 1, right=None)}
    return Causal() & Segments(ids, ids) if point.mask == "segments" else masks[point.mask]


def ours(point: Point) -> Attend:
    """This library's `attention`; its kernel is chosen by `auto`."""
    mask = mask_of(point)
    return lambda q, k, v: attention(q, k, v, mask)


def plain(point: Point) -> Attend:
    """The formula in jax.numpy, all pairs at once."""
    visible = point.visible

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        batch, heads, length, width = q.shape
        grouped = q.reshape(batch, k.shape[1], heads // k.shape[1], length, width)
        logits = jnp.einsum("bkgtd,bksd->bkgts", grouped, k) / jnp.asarray(width**0.5, q.dtype)
        if visible is not None:
            logits = jnp.where(visible[:, :, None], logits, jnp.asarray(-jnp.inf, q.dtype))
        return jnp.einsum("bkgts,bksd->bkgtd", jax.nn.softmax(logits), v).reshape(q.shape)

    return attend


def jax_nn(point: Point) -> Attend:
    """`jax.nn.dot_product_attention`, layout (B, T, H, D)."""
    return functools.partial(jax.nn.dot_product_attention, **_named(point))


def _named(point: Point) -> dict[str, Any]:
    """The mask in the words of jax.nn, which are tokamax's too."""
    options: dict[str, Any] = {"is_causal": point.mask == "causal"}
    if point.mask == "window":
        options["local_window_size"] = (WINDOW - 1, 0)
    if point.mask == "segments":
        options["mask"] = jnp.asarray(point.visible)
    return options


def flax_nnx(point: Point) -> Attend:
    """`flax.nnx.dot_product_attention`, layout (B, T, H, D), which has no grouped heads."""
    if point.heads != point.kv_heads:
        raise NotSupported("no grouped heads")
    visible = None if point.mask == "causal" else point.visible

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = None if visible is None else jnp.broadcast_to(visible, (point.batch, point.heads, *visible.shape[2:]))
        return nnx.dot_product_attention(q, k, v, mask=mask, is_causal=point.mask == "causal")

    return attend


def tokamax(point: Point) -> Attend:
    """`tokamax.dot_product_attention`, layout (B, T, H, D)."""
    attend = _module("tokamax").dot_product_attention
    _module("absl.flags").FLAGS(["attention-jax"])  # or it reads the words of our own command line
    return functools.partial(attend, **_named(point))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise NotSupported(f"{missing.name} is not installed") from None


OURS = "attention_jax"
HEADS_FIRST = {OURS: ours, "plain jnp": plain}
HEADS_LATE = {"jax.nn": jax_nn, "flax": flax_nnx, "tokamax": tokamax}
OPTIONAL = ("tokamax", "torch")


def installed() -> list[str]:
    """The peers that can be imported here."""
    return ["plain jnp", "jax.nn", "flax", *(name for name in OPTIONAL if importlib.util.find_spec(name))]


def enter(name: str, point: Point) -> Entry:
    """The entry of a contestant.

    Raises:
        NotSupported: it cannot do this, or is not installed.
    """
    if name == "torch":
        return _torch(point)
    attend, late = (HEADS_FIRST | HEADS_LATE)[name](point), name in HEADS_LATE
    q, k, v, d_out = (jnp.asarray(_swapped(x) if late else x, point.dtype) for x in point.inputs)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(d_out)

    def numbers(result: Any) -> Arrays:
        return [_swapped(x) for x in as_arrays(result)] if late else as_arrays(result)

    # the names of peers stand for what their users run: their own rules of promotion are part of it
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if point.direction == "not jitted":
            return Entry(lambda: jax.block_until_ready(attend(q, k, v)), numbers)
        if point.direction == "forward":
            return jitted(attend, q, k, v, numbers=numbers)
        return jitted(both, q, k, v, d_out, numbers=numbers)


def expected(point: Point) -> Arrays:
    """What all must return: the formula in float32 at the highest precision of products."""
    with jax.default_matmul_precision("highest"):
        # rounded first, as all contestants are given them
        q, k, v, d_out = (jnp.asarray(jnp.asarray(x, point.dtype), jnp.float32) for x in point.inputs)
        out, pull_back = jax.vjp(jax.jit(plain(point)), q, k, v)
        results = (out, *pull_back(d_out)) if point.direction == "forward and backward" else (out,)
    return as_arrays(results)


def _swapped(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def torch_on_all_cores() -> Any:
    """Torch, with as many threads as there are processors for XLA."""
    torch = _module("torch")
    torch.set_num_threads(cores())
    return torch


def _torch(point: Point) -> Entry:
    """`torch.nn.functional.scaled_dot_product_attention`."""
    torch = torch_on_all_cores()
    if jax.default_backend() != "cpu":
        if not torch.cuda.is_available():
            raise NotSupported("torch finds no such device")
        device, wait = "cuda", torch.cuda.synchronize
    else:
        device, wait = "cpu", lambda: None
    dtype = getattr(torch, point.dtype)
    q, k, v, d_out = (torch.from_numpy(x).to(device, dtype) for x in point.inputs)
    options: dict[str, Any] = {"is_causal": point.mask == "causal", "enable_gqa": point.heads != point.kv_heads}
    if point.mask in ("window", "segments"):
        options["attn_mask"] = torch.from_numpy(np.ascontiguousarray(point.visible)).to(device)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, **options)

    def forward() -> Any:
        with torch.inference_mode():
            out = attend(q, k, v)
        wait()
        return (out,)

    def both() -> Any:
        out = attend(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, d_out))
        wait()
        return found

    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    run = both if point.direction == "forward and backward" else forward
    return Entry(run, lambda result: [x.double().cpu().numpy() for x in result])
