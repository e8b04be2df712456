"""Associative recall: can a mixer find the value that came with a key, however far back?

Each of P tokens carries a key and a value; then every key is asked for once. There are no positions to go by, so the
answer is in the content alone: attention looks it up, a recurrence must have carried all P pairs in its state.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from . import data
from .losses import cross_entropy
from .models import RecallModel
from .training import Recipe, fit

SCORED_BATCH = 512
TRAINING, TEST = 0, 1  # so that no sequence is drawn for both from one seed


class Recall(NamedTuple):
    """Where training on associative recall stands.

    Attributes:
        accuracy: share of right answers on sequences not trained on; a guess gives 1/16.
        step: steps done, of `steps`.
        steps: what was asked for.
    """

    accuracy: float
    step: int
    steps: int


def train_recall(
    mixer: str,
    pairs: int,
    steps: int,
    seed: int = 0,
    *,
    batch: int = 64,
    width: int = 64,
    learning_rate: float = 3e-3,
    seconds: float = math.inf,
    enough: float = 1.0,
    look_every: int = 50,
) -> Iterator[Recall]:
    """Trains two blocks on sequences of `pairs` pairs, drawn anew at each step, and yields the accuracy as it goes.

    Args:
        mixer: one of `models.MIXERS`.
        pairs: P; the distance from a pair to its query is P on average.
        steps: at most; and the length of the schedule.
        seed: of the parameters, the sequences and the test.
        batch: sequences per step.
        width: of the model.
        learning_rate: its peak.
        seconds: of training, after which it stops; compiling counts, looking does not.
        enough: training stops once the accuracy is this high.
        look_every: steps between two looks; the first and the last step are always looked at.

    Example:
        >>> *_, last = train_recall("attention", pairs=2, steps=3, batch=4, width=16)
        >>> last.step, last.steps
        (3, 3)
    """
    model = RecallModel(mixer, width=width, rngs=nnx.Rngs(seed))
    recipe = Recipe(steps, batch=batch, length=2 * pairs, learning_rate=learning_rate, seed=seed)
    unseen = data.recall_batch(np.random.default_rng((seed, TEST)), SCORED_BATCH, pairs)
    sequences = functools.partial(_sequences, seed, batch, pairs)
    for progress in fit(model, sequences, _loss, recipe, seconds=seconds, report_every=look_every):
        share = accuracy(model, unseen)
        yield Recall(share, progress.step, steps)
        if share >= enough:
            return


def accuracy(model: nnx.Module, asked: data.RecallBatch) -> float:
    """Share of the queries whose likeliest value is the right one.

    Example:
        >>> asked = data.recall_batch(np.random.default_rng(0), batch=8, pairs=4)
        >>> 0 <= accuracy(RecallModel(width=16, rngs=nnx.Rngs(0)), asked) <= 1
        True
    """
    graphdef, state = nnx.split(model)
    return float(_share(graphdef, state, asked))


@functools.partial(jax.jit, static_argnums=0)
def _share(graphdef: nnx.GraphDef, state: Any, asked: data.RecallBatch) -> Float[Array, ""]:
    logits = nnx.merge(graphdef, state)(asked.keys, asked.values)
    counted = asked.answers >= 0
    right = jnp.argmax(logits, axis=-1).astype(jnp.int32) == asked.answers  # never at the pairs, where it is -1
    return right.sum(dtype=jnp.int32).astype(jnp.float32) / counted.sum(dtype=jnp.int32).astype(jnp.float32)


def _sequences(seed: int, batch: int, pairs: int, start: int) -> Iterator[data.RecallBatch]:
    """Batch n depends on (seed, n) alone."""
    for step in itertools.count(start):
        yield data.recall_batch(np.random.default_rng((seed, TRAINING, step)), batch, pairs)


def _loss(model: Any, asked: data.RecallBatch) -> Float[Array, ""]:
    return cross_entropy(model(asked.keys, asked.values), asked.answers, ignore=-1)
