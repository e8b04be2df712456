"""A small causal language model whose mixer is attention or a recurrence, and a twin for associative recall.

The mixer is chosen once, in `_mixer`; everything else is the same, so two models differ in one word.
"""

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from . import data, recurrent
from .errors import explain
from .layers import Block, MultiHeadAttention, Recurrence
from .masks import Causal
from .rotary import Rotary

MIXERS = ("attention", *recurrent.CELLS)


class CausalLM(nnx.Module):
    """Embed, mix in pre-norm blocks, norm, logits: what comes next after each token.

    Example:
        >>> model = CausalLM(width=32, depth=1, heads=2, mixer="attention", rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((2, 5), int)).shape
        (2, 5, 256)
    """

    def __init__(
        self,
        vocab: int = 256,
        width: int = 128,
        depth: int = 2,
        heads: int = 4,
        mixer: str = "attention",
        *,
        state: int | None = None,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        """Draws the parameters.

        Args:
            vocab: number of different tokens.
            width: of the model, W; the MLP is 4 W wide.
            depth: number of blocks.
            heads: of attention; W / heads is even, for rotary positions.
            mixer: "attention", "elman", "gru", "lstm" or "linear".
            state: width N of a recurrent state; by default the one that gives a recurrence as many parameters as
                attention has (`matched_sizes`).
            dropout: on both branches of each block, and on the weights of attention.
            rngs: streams "params" and, with dropout, "dropout".

        Raises:
            ValueError: an unknown mixer, or an odd number of features for each head.
        """
        if width % heads or width // heads % 2:
            rule = "the width W must be an even multiple of the heads H, for rotary positions."
            raise ValueError(explain("CausalLM", rule, {"width W": width, "heads H": heads}))
        state = matched_sizes([mixer], width, heads)[mixer] if state is None else state
        sizes = {"vocab": vocab, "width": width, "depth": depth, "heads": heads, "mixer": mixer, "state": state}
        self._sizes = nnx.static(tuple(sizes.items()))
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        mixers = [_mixer(mixer, width, heads, state, rotary=Rotary(), dropout=dropout, rngs=rngs) for _ in range(depth)]
        self.blocks = nnx.List([Block(mixer, width, 4 * width, dropout=dropout, rngs=rngs) for mixer in mixers])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Int[Array, "*B T"]) -> Float[Array, "*B T vocab"]:
        """Logits of the token after each position, from the tokens up to it."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments that shape the model: `CausalLM(**model.sizes, rngs=…)` is one of the same shape."""
        return dict(self._sizes)


class RecallModel(nnx.Module):
    """The blocks of `CausalLM` on associative recall: a token is the sum of a key's and a value's embedding.

    Attention has no positions here: what it needs to find a pair is in the token.

    Example:
        >>> from attention_jax.data import recall_batch
        >>> drawn = recall_batch(np.random.default_rng(0), batch=2, pairs=3)
        >>> RecallModel(mixer="gru", rngs=nnx.Rngs(0))(drawn.keys, drawn.values).shape
        (2, 6, 17)
    """

    def __init__(self, mixer: str = "attention", *, width: int = 64, depth: int = 2, heads: int = 4, rngs: nnx.Rngs):
        """Draws the parameters; as many for every mixer."""
        state = matched_sizes([mixer], width, heads)[mixer]
        self.keys = nnx.Embed(data.RECALL_KEYS, width, rngs=rngs)
        self.values = nnx.Embed(data.RECALL_VALUES + 1, width, rngs=rngs)
        mixers = [_mixer(mixer, width, heads, state, rotary=None, dropout=0.0, rngs=rngs) for _ in range(depth)]
        self.blocks = nnx.List([Block(mixer, width, 4 * width, rngs=rngs) for mixer in mixers])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.logits = nnx.Linear(width, data.RECALL_VALUES + 1, use_bias=False, rngs=rngs)

    def __call__(self, keys: Int[Array, "*B T"], values: Int[Array, "*B T"]) -> Float[Array, "*B T values"]:
        """Logits of the value that belongs to each token's key; 0 is "no value"."""
        x = self.keys(keys) + self.values(values)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def _mixer(
    name: str, width: int, heads: int, state: int | None, *, rotary: Rotary | None, dropout: float, rngs: nnx.Rngs
) -> nnx.Module:
    if name == "attention":
        return MultiHeadAttention(width, heads, mask=Causal(), rotary=rotary, dropout=dropout, rngs=rngs)
    assert state is not None  # by `matched_sizes`, for every recurrence
    return Recurrence(width, state, name, rngs=rngs)


def parameter_count(model: nnx.Module) -> int:
    """How many numbers a model learns.

    Example:
        >>> parameter_count(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
        16
    """
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def matched_sizes(mixers: Iterable[str], width: int, heads: int) -> dict[str, int | None]:
    """The state width N with which each recurrence has as many parameters as attention, projections included.

    As near as whole numbers allow: models of width 32 and more differ by less than 2 % in all.

    Returns:
        By mixer; None for attention, which has no state.

    Raises:
        ValueError: an unknown mixer.

    Example:
        >>> matched_sizes(["attention", "gru"], width=128, heads=4)
        {'attention': None, 'gru': 85}
    """
    mixers = list(mixers)
    for mixer in mixers:
        if mixer not in MIXERS:
            raise ValueError(explain("mixer", f"unknown mixer {mixer!r}.", {"known": ", ".join(MIXERS)}))
    return {mixer: None if mixer == "attention" else _matched(mixer, width, heads) for mixer in mixers}


@functools.lru_cache(maxsize=256)
def _matched(mixer: str, width: int, heads: int) -> int:
    def count(name: str, state: int | None) -> int:
        make = lambda: _mixer(name, width, heads, state, rotary=None, dropout=0.0, rngs=nnx.Rngs(0))  # noqa: E731
        return parameter_count(nnx.eval_shape(make))

    wanted = count("attention", None)
    low, high = 1, 2
    while count(mixer, high) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(mixer, middle) < wanted else (low, middle)
    return min(low, high, key=lambda state: abs(count(mixer, state) - wanted))


def sample(
    model: nnx.Module,
    prompt: np.ndarray,
    count: int,
    key: Key[Array, ""],
    *,
    temperature: float = 1.0,
    length: int = 128,
) -> np.ndarray:
    """Continues a prompt token by token, each drawn from softmax(logits / temperature).

    The whole window, the last `length` tokens, goes through the model again for each token; one compiled loop does it.

    Args:
        model: from tokens (1, T) to logits.
        prompt: at least one token; only its last `length` are read.
        count: tokens to draw.
        key: the same key gives the same text.
        temperature: 0 takes the likeliest token.
        length: of the window; the one of training is a good choice.

    Returns:
        The `count` new tokens, int32.

    Raises:
        TypeError: a prompt that is not one row of integers.
        ValueError: nothing to go on, a negative or infinite number, or a token that the model has not.

    Example:
        >>> model = CausalLM(width=16, depth=1, heads=2, rngs=nnx.Rngs(0))
        >>> sample(model, np.array([1, 2, 3]), 4, jax.random.key(0), length=8).shape
        (4,)
    """
    prompt, count = np.asarray(prompt), operator.index(count)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise TypeError(
            explain("sample", "a prompt is one row of integers.", {"prompt": f"{prompt.dtype}{prompt.shape}"})
        )
    if len(prompt) < 1 or count < 0 or length < 1 or not 0 <= temperature < math.inf:
        facts = {"prompt tokens": len(prompt), "count": count, "length": length, "temperature": temperature}
        rule = "sampling needs a prompt and a window of a token at least, and no negative numbers."
        raise ValueError(explain("sample", rule, facts))
    vocab = getattr(model, "sizes", {}).get("vocab", math.inf)
    if prompt.min() < 0 or prompt.max() >= vocab:
        facts = {"smallest": prompt.min(), "largest": prompt.max(), "vocabulary": vocab}
        raise ValueError(explain("sample", "the prompt holds tokens that the model has not.", facts))
    speaking = nnx.clone(model)
    speaking.eval()
    graphdef, state = nnx.split(speaking)
    recent = np.asarray(prompt[-length:], np.int32)
    window = np.pad(recent, (0, length - len(recent)))
    drawn = _sampler(graphdef, count)(state, window, np.int32(len(recent)), key, np.float32(temperature))
    return np.asarray(drawn)


@functools.lru_cache(maxsize=16)
def _sampler(graphdef: nnx.GraphDef, count: int) -> Any:
    def run(state: Any, window: Array, filled: Array, key: Array, temperature: Array) -> Array:
        model = nnx.merge(graphdef, state)

        def step(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
            window, filled = carry
            logits = model(window[None])[0, filled - 1].astype(jnp.float32)
            noise = jnp.where(temperature > 0, jax.random.gumbel(key, logits.shape), jnp.zeros_like(logits))
            token = jnp.argmax(logits + temperature * noise).astype(jnp.int32)
            full = filled == window.size
            window = jnp.where(full, jnp.roll(window, -1), window).at[jnp.where(full, filled - 1, filled)].set(token)
            return (window, jnp.minimum(filled + 1, window.size)), token

        return jax.lax.scan(step, (window, filled), jax.random.split(key, count))[1]

    return jax.jit(run)
