"""Training by teacher forcing: every window is its own answer, shifted by one.

`train` is a generator, so whoever calls it draws the progress and may stop it at any step. A step is one jitted
function, compiled once; the learning rate goes in as a number, so a schedule of another length compiles nothing.
"""

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from . import checkpoints, data
from .errors import explain
from .losses import cross_entropy as cross_entropy
from .losses import lm_loss as lm_loss
from .recipe import Recipe as Recipe


class Progress(NamedTuple):
    """Where a run stands.

    Attributes:
        step: steps done, of `steps`.
        steps: what the recipe asks for.
        loss: of the last step, in nats per token.
        tokens_per_second: mean since the end of the first step, which compiles; 0 at the first step.
    """

    step: int
    steps: int
    loss: float
    tokens_per_second: float


class _State(NamedTuple):
    params: PyTree
    others: PyTree  # counters of random streams, and whatever else the model keeps
    moments: optax.OptState


Loss = Callable[[nnx.Module, Any], Float[Array, ""]]


@functools.lru_cache(maxsize=16)
def _step(graphdef: nnx.GraphDef, loss: Loss, clip: float, weight_decay: float) -> tuple[Callable, Callable]:
    """(start, step): the state of a fresh run from (params, others), and the jitted step from one state to the next."""
    # AdamW's own rate is 1, so that its update, decay included, can be scaled by a rate that is an argument.
    optimiser = optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1.0, weight_decay=weight_decay))

    def start(params: PyTree, others: PyTree) -> _State:
        return jax.tree.map(jnp.copy, _State(params, others, optimiser.init(params)))  # a step consumes its state

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: _State, batch: PyTree, rate: Float[Array, ""]) -> tuple[_State, Array]:
        def of(params: PyTree) -> tuple[Array, PyTree]:
            model = nnx.merge(graphdef, params, state.others, copy=True)  # the counters inside it advance here
            value = loss(model, batch)
            _, _, others = nnx.split(model, nnx.Param, ...)
            return value, others

        (value, others), gradient = jax.value_and_grad(of, has_aux=True)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax multiplies arrays of several dtypes
            updates, moments = optimiser.update(gradient, state.moments, state.params)
            updates = jax.tree.map(lambda update: (rate * update).astype(update.dtype), updates)
            params = optax.apply_updates(state.params, updates)
        return _State(params, others, moments), value

    return start, step


@functools.lru_cache(maxsize=16)
def _next_token(pad: int | None) -> Loss:
    def loss(model: Any, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
        return lm_loss(model(tokens), tokens, pad=pad)

    return loss


def train(
    model: nnx.Module, tokens: np.ndarray, recipe: Recipe, *, pad: int | None = None, **options: Any
) -> Iterator[Progress]:
    """Teaches a language model the next token of random windows of a text. Everything else is said at `fit`.

    Example:
        >>> from attention_jax.models import CausalLM
        >>> model = CausalLM(width=8, depth=1, heads=1, mixer="elman", rngs=nnx.Rngs(0))
        >>> text = np.tile(np.arange(16, dtype=np.uint8), 40)
        >>> for progress in train(model, text, Recipe(steps=20, batch=4, length=16, learning_rate=1e-2)):
        ...     pass  # draw a bar here
        >>> progress.step, evaluate(model, text, length=16) < 8
        (20, True)
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(explain("train", "the third argument is a Recipe.", {"recipe": type(recipe).__name__}))

    def from_step(start: int) -> Iterator[np.ndarray]:
        return data.batches(tokens, recipe.batch, recipe.length, recipe.seed, start)

    from_step(0)  # refuses a text that is too short, before work starts
    return fit(model, from_step, _next_token(pad), recipe, **options)


def fit(
    model: nnx.Module,
    batches: Callable[[int], Iterable[Any]],
    loss: Loss,
    recipe: Recipe,
    *,
    seconds: float = math.inf,
    report_every: int = 10,
    folder: str | os.PathLike | None = None,
    save_every: int = 100,
    settings: dict[str, Any] | None = None,
) -> Iterator[Progress]:
    """Trains a model with AdamW, step by step, and yields where it stands.

    At each yield, and when the loop ends, the model holds the parameters reached, so the caller may evaluate it. The
    loop ends after the last step, when `seconds` are over, or when the caller leaves it (`close`, `break`).

    Args:
        model: any NNX module; random streams inside it advance and are saved.
        batches: from the number of a step to the batches from there on; so a resumed run sees what it would have seen.
        loss: from (model, batch) to a scalar. Defined once: a fresh function compiles again.
        recipe: the schedule. `batch`, `length` and `seed` are for whoever makes the batches.
        seconds: of training, compiling included; what the caller does between two reports does not count. Looked at
            after each step handed to the device, which may lag behind by `report_every` steps.
        report_every: steps between two yields; the first and the last step that are done are always reported. A run
            that was complete before has none.
        folder: where checkpoints are kept. A run whose folder holds one continues from there, and ends with the same
            bits as if it had never stopped.
        save_every: steps between two checkpoints; the end of the loop saves too.
        settings: what else to write beside the recipe, and to insist on when continuing.

    Raises:
        TypeError: settings that JSON cannot hold.
        ValueError: the folder is a file, or holds a checkpoint of another recipe, of other settings or of another
            model; a number that must be positive is not.
    """
    facts = {"seconds": seconds, "report_every": report_every, "save_every": save_every}
    if not min(facts.values()) > 0 or math.isnan(seconds):
        raise ValueError(explain("fit", "these must be positive.", facts))
    if folder is not None and os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(explain("fit", "the folder of checkpoints is a file.", {"folder": folder}))
    known = json.loads(json.dumps({"recipe": dataclasses.asdict(recipe), **(settings or {})}))  # as it is read back
    learner, state = _begin(model, loss, recipe)
    done = saved = 0
    if folder is not None and (found := checkpoints.newest(folder)) is not None:
        if (stored := checkpoints.settings_of(folder)) != known:
            facts = {"folder": folder, "stored": stored, "this run": known}
            raise ValueError(explain("fit", "the folder holds a checkpoint of another run.", facts, "Choose another."))
        state, done, saved = checkpoints.restore(folder, state), found, found
    first, clock = done + 1, _Clock()
    try:
        for batch in batches(done):
            if done >= recipe.steps or clock.seconds() >= seconds:
                break
            state, value = learner(state, batch, np.float32(recipe.rate(done)))
            done += 1
            if done == first or done % report_every == 0 or done == recipe.steps:
                loss_now = float(value)  # waits for the device
                nnx.update(model, *jax.tree.map(jnp.copy, (state.params, state.others)))  # a step consumes its state
                speed = clock.speed((done - first) * jax.tree.leaves(batch)[0].size)
                clock.pause()
                yield Progress(done, recipe.steps, loss_now, speed)
                clock.resume()
            if folder is not None and done % save_every == 0:
                checkpoints.save(folder, done, state, known)
                saved = done
    except GeneratorExit:  # the caller left the loop, so a step has just been finished
        pass
    finally:
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):  # true of an interrupt within a step
            nnx.update(model, state.params, state.others)
    if folder is not None and saved != done:
        checkpoints.save(folder, done, state, known)


class _Clock:
    """Seconds spent on training; stopped while the caller has its turn."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.compiled: float | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def speed(self, tokens: int) -> float:
        """Tokens per second since the first call, which is made after the step that compiles and gives 0."""
        if self.compiled is None:
            self.compiled = self.seconds()
            return 0.0
        return tokens / (self.seconds() - self.compiled)

    def pause(self) -> None:
        self.paused = time.perf_counter()

    def resume(self) -> None:
        self.begin += time.perf_counter() - self.paused


def _begin(model: nnx.Module, loss: Loss, recipe: Recipe) -> tuple[Callable, _State]:
    learning = nnx.clone(model)
    learning.train()
    graphdef, params, others = nnx.split(learning, nnx.Param, ...)
    start, step = _step(graphdef, loss, recipe.clip, recipe.weight_decay)
    return step, start(params, others)


def steps_within(
    seconds: float, model: nnx.Module, tokens: np.ndarray, recipe: Recipe, *, pad: int | None = None
) -> int:
    """How many steps of a recipe fit into a wall-clock budget, measured on a copy of the model; at least 1.

    Measuring compiles the step, which `train` then uses whatever its number of steps, and comes out of the budget. So
    `replace(recipe, steps=steps_within(30, …))` trains to the end of its schedule in 30 seconds, and the number, once
    known, gives the same run again.
    """
    begin = time.perf_counter()
    learner, state = _begin(model, _next_token(pad), recipe)
    windows = data.batches(tokens, recipe.batch, recipe.length, recipe.seed)
    state, value = learner(state, next(windows), np.float32(0))
    value.block_until_ready()
    compiled = time.perf_counter()
    timed = 0
    while timed < 3 or time.perf_counter() - compiled < min(1.0, seconds / 20):
        state, value = learner(state, next(windows), np.float32(0))
        value.block_until_ready()
        timed += 1
    now = time.perf_counter()
    return max(1, int((seconds - (now - begin)) * timed / (now - compiled)))


@functools.lru_cache(maxsize=16)
def _scorer(graphdef: nnx.GraphDef) -> Callable:
    @jax.jit
    def nats(state: nnx.State, tokens: Int[Array, "B T"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
        logits = nnx.merge(graphdef, state)(tokens)
        return lm_loss(logits, labels, pad=-1) * (labels[:, 1:] >= 0).sum().astype(logits.dtype)

    return nats


def evaluate(model: nnx.Module, tokens: np.ndarray, length: int, *, batch: int = 32) -> float:
    """Bits per byte of a text under a model, every byte but the first predicted exactly once.

    The text is cut into windows of `length` that overlap by one token: the last of a window is the first, unscored, of
    the next. A window starts with no memory of the one before, so a byte is predicted from 1 to `length` - 1 bytes,
    from half of `length` on average: a model is judged on the context it was trained on. The last window may be short.

    Raises:
        ValueError: fewer than two tokens, or windows shorter than that.
    """
    if len(tokens) < 2 or length < 2 or batch < 1:
        facts = {"tokens": len(tokens), "length": length}
        raise ValueError(explain("evaluate", "two tokens are the least that can be scored.", facts))
    judged = nnx.clone(model)
    judged.eval()
    graphdef, state = nnx.split(judged)
    starts = np.arange(0, len(tokens) - 1, length - 1)
    starts = np.pad(starts, (0, -len(starts) % batch), constant_values=len(tokens))  # windows past the end: none count
    places = starts[:, None] + np.arange(length)
    read = tokens[np.minimum(places, len(tokens) - 1)].astype(np.int32)
    labels = np.where(places < len(tokens), read, -1)
    cuts = range(0, len(starts), batch)
    total = sum(float(_scorer(graphdef)(state, read[i : i + batch], labels[i : i + batch])) for i in cuts)
    return total / (len(tokens) - 1) / math.log(2)
