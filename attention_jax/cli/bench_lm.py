"""One training step of language models that differ in their mixer alone, with as many parameters each."""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from .. import data, models, training
from . import contest
from .display import Display
from .names import MIXERS

BASE = MIXERS["attention"]
OURS = tuple(MIXERS.values())
WIDTH, HEADS, DEPTH = 128, 4, 2
BATCHES = ((8, 128), (4, 512), (1, 2048))  # sequences and tokens of each
DIRECTION = "training step"


def measure(results: dict[str, Any], options: argparse.Namespace, display: Display) -> None:
    """Fill `results` with a row per batch and mixer; `tokens_per_s` beside the times."""
    tokens = data.load_text().tokens
    sizes = models.matched_sizes(models.MIXERS, WIDTH, HEADS)
    with display.bar("language models", len(BATCHES)) as show:
        for done, (batch, length) in enumerate(BATCHES):
            show(done, f"{batch} × {length} tokens")
            recipe = training.Recipe(contest.WARM_UP + options.rounds + 1, batch, length)
            enter = {
                MIXERS[mixer]: lambda mixer=mixer, recipe=recipe: _entry(mixer, sizes[mixer], tokens, recipe)
                for mixer in models.MIXERS
            }
            rows = contest.hold(enter, {}, 0.0, options.rounds)
            for row in rows:
                row |= {"point": f"{batch}×{length}", "direction": DIRECTION}
                if "median_ms" in row:
                    row["tokens_per_s"] = 1e3 * batch * length / row["median_ms"]
            results["rows"] += rows


def _entry(mixer: str, state: int | None, tokens: Any, recipe: training.Recipe) -> contest.Entry:
    model = models.CausalLM(width=WIDTH, heads=HEADS, depth=DEPTH, mixer=mixer, state=state, rngs=nnx.Rngs(0))
    steps: Iterator[training.Progress] = training.train(model, tokens, recipe, report_every=1)
    return contest.Entry(lambda: next(steps), lambda progress: [np.asarray(progress.loss)])
