"""The part "recall" of the main job: who can find the value that came with a key?

Method: `recall.train_recall` on ever more pairs, attention and a recurrence in turn, with the same number of parameters
and at most as many steps; accuracy on sequences that were not trained on.
"""

import time
from typing import Any

import jax
from flax import nnx

from .. import models, recall
from .budget import Budget
from .display import Display
from .names import MIXERS, percent

PAIRS = (8, 16, 32)
STEPS, BATCH, WIDTH, LAYERS = 200, 64, 64, 2  # attention is done after 50 to 100 steps, a GRU no longer improves
ENOUGH = 0.999
CHANCE = 1 / 16


def pick(mixers: list[str]) -> list[str]:
    """Attention and one recurrence, of the mixers asked for.

    Example:
        >>> pick(["linear", "gru", "attention"]), pick(["lstm"])
        (['attention', 'gru'], ['lstm'])
    """
    return [name for name in ("attention", "gru", "lstm", "elman", "linear") if name in mixers][:2]


def remember(part: dict[str, Any], mixers: list[str], seed: int, budget: Budget, display: Display) -> None:
    """Train on each number of pairs, the small ones first; `part` is filled run by run, and valid at any time."""
    part |= {"chance_accuracy": CHANCE, "layers": LAYERS, "width": WIDTH, "batch_sequences": BATCH, "steps": STEPS}
    chosen = pick(mixers)
    for mixer in chosen:
        part["models"].append({"mixer": mixer, "parameters": _parameters(mixer), "runs": []})
    waiting, least = len(PAIRS) * len(chosen), 0.0
    for pairs in PAIRS:
        for model in part["models"]:
            if budget.left < 1.2 * least:
                return
            # One run that ends says more than six that do not: each gets time to train besides compiling.
            own = budget.part(0.5 if not least else min(1, max(1 / waiting, 2 * least / budget.left)))
            least = max(least, _run(model, pairs, seed, own, display))
            waiting -= 1
    part["finished"] = True


def _run(model: dict[str, Any], pairs: int, seed: int, budget: Budget, display: Display) -> float:
    """Train one model on one number of pairs; the seconds that a run takes at least, since it compiles."""
    title, begin, first = f"{MIXERS[model['mixer']]}, {pairs} pairs", time.perf_counter(), None
    run: dict[str, Any] = {}
    sizes = {"batch": BATCH, "width": WIDTH}
    with display.bar(title, STEPS) as show:
        for now in recall.train_recall(model["mixer"], pairs, STEPS, seed, **sizes, enough=ENOUGH, look_every=25):
            seconds = time.perf_counter() - begin
            first = first or seconds
            run = {"pairs": pairs, "accuracy": now.accuracy, "steps": now.step, "seconds": seconds}
            show(now.step, percent(now.accuracy))
            if budget.over:
                break
    model["runs"].append(run)
    display.line(f"{title}: {percent(run['accuracy'])} right answers after {run['steps']} steps")
    return first or 0.0


def _parameters(mixer: str) -> int:
    model = nnx.eval_shape(lambda: models.RecallModel(mixer, width=WIDTH, depth=LAYERS, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
