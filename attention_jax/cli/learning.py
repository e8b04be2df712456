"""The parts "train" and "sample" of the main job: what does each model learn of the same text, and what does it cost?

Method: models that differ in their mixer alone, with as many parameters, read the same bytes in the same order, as many
as fit into the budget; now and then each predicts the last tenth of the text, which it never trains on.
"""

import dataclasses
import pathlib
import re
import time
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import checkpoints, data, models, training
from .budget import Budget
from .display import Display
from .names import MIXERS
from .stopping import stop_if_asked

LENGTH, BATCH = 128, 8
LARGEST_VALIDATION = 65_536  # bytes; the last tenth of a long text would take longer to score than to train for
SCORED_AT_ONCE = 32
SAMPLE_BYTES = 300
TEMPERATURE = 0.8


@dataclasses.dataclass
class Learner:
    """A model that is ready to be trained: compiled, and its pace known."""

    mixer: str
    model: models.CausalLM
    seconds_per_step: float
    seconds_per_look: float
    seconds_to_prepare: float


def train(
    part: dict[str, Any],
    text: data.Text,
    mixers: list[str],
    seed: int,
    budget: Budget,
    display: Display,
    folder: pathlib.Path,
) -> dict[str, models.CausalLM]:
    """Train one model per mixer; `part` is filled as results come, and valid at any time.

    Args:
        part: the results, see `train_one` for those of a model.
        text: split into what is trained on and the last tenth.
        mixers: in this order.
        seed: of parameters and windows.
        budget: all of it, compiling included.
        display: shows the progress.
        folder: where checkpoints go, one folder per mixer.

    Returns:
        The models, as far as they were trained, by mixer.
    """
    reading, unseen = data.split(text.tokens)
    unseen = unseen[:LARGEST_VALIDATION]
    part |= {
        "context_length_tokens": LENGTH,
        "batch_windows": BATCH,
        "validation_bytes": len(unseen),
        "bigram_bits_per_byte": data.ngram_bits(reading, unseen, 2),
        "trigram_bits_per_byte": data.ngram_bits(reading, unseen, 3),
    }
    learners: list[Learner] = []
    for mixer in mixers:
        if learners and budget.left < 2 * max(learner.seconds_to_prepare for learner in learners):
            break  # two models with some training say more than three with none
        with display.bar(f"compiling {MIXERS[mixer]}", None):
            learners.append(prepare(mixer, reading, unseen, seed))
    recipe, looks = plan(learners, budget, seed)
    done = {}
    for place, learner in enumerate(learners):
        rest = sum(each.seconds_per_step for each in learners[place:])
        own = budget.part(learner.seconds_per_step / rest)
        part["models"].append(record := {"mixer": learner.mixer})
        train_one(record, learner, recipe, looks, (reading, unseen), own, display, folder, text.sha256)
        done[learner.mixer] = learner.model
    part["finished"] = len(done) == len(mixers) and all(model["finished"] for model in part["models"])
    return done


def prepare(mixer: str, reading: np.ndarray, unseen: np.ndarray, seed: int) -> Learner:
    """A fresh model, with its step and its evaluation compiled and timed."""
    begun = time.perf_counter()
    model = models.CausalLM(mixer=mixer, rngs=nnx.Rngs(seed))
    ample = 1e4  # seconds, of which the number of steps tells how long one takes
    begin = time.perf_counter()
    steps = training.steps_within(ample, model, reading, training.Recipe(1, BATCH, LENGTH))
    per_step = (ample - (time.perf_counter() - begin)) / steps
    stop_if_asked()
    few = unseen[: SCORED_AT_ONCE * (LENGTH - 1) + 1]
    training.evaluate(model, few, LENGTH, batch=SCORED_AT_ONCE)
    begin = time.perf_counter()
    training.evaluate(model, few, LENGTH, batch=SCORED_AT_ONCE)
    now = time.perf_counter()
    return Learner(mixer, model, per_step, (now - begin) * len(unseen) / len(few), now - begun)


def plan(learners: list[Learner], budget: Budget, seed: int) -> tuple[training.Recipe, int]:
    """As many steps as all models can take in the budget, and how often to look at the unseen text meanwhile."""
    looking = sum(learner.seconds_per_look for learner in learners)
    looks = int(min(max(0.2 * budget.left / looking, 1), 6))
    left = 0.92 * budget.left - looks * looking - len(learners)  # a second each to save a checkpoint
    steps = max(1, int(left / sum(learner.seconds_per_step for learner in learners)))
    return training.Recipe(steps, BATCH, LENGTH, seed=seed, warmup=min(20, steps // 10)), looks


def train_one(
    record: dict[str, Any],
    learner: Learner,
    recipe: training.Recipe,
    looks: int,
    text: tuple[np.ndarray, np.ndarray],
    budget: Budget,
    display: Display,
    folder: pathlib.Path,
    sha256: str,
) -> None:
    """Train one model, look at the unseen text after 1/2ⁿ, …, 1/4, 1/2 and all of the steps, and save it.

    Fills `record`: `parameters`, `steps` of `steps_planned`, `tokens` read, `seconds_to_prepare` (draw parameters,
    compile), `seconds` of training alone, `tokens_per_second`, `curve`, and its last `validation_bits_per_byte`.
    """
    reading, unseen = text
    record |= {
        "parameters": models.parameter_count(learner.model),
        "validation_bits_per_byte": None,
        "steps": 0,
        "steps_planned": recipe.steps,
        "tokens": 0,
        "tokens_per_second": 0.0,
        "seconds": 0.0,
        "seconds_to_prepare": learner.seconds_to_prepare,
        "curve": [],
        "finished": False,
    }
    places = {max(1, recipe.steps >> n) for n in range(looks)}
    title, looking = MIXERS[learner.mixer], 0.0
    begin = time.perf_counter()
    try:
        with display.bar(title, recipe.steps) as show:
            for now in training.train(learner.model, reading, recipe, report_every=1 if recipe.steps < 40 else 5):
                record |= {
                    "steps": now.step,
                    "tokens": now.step * BATCH * LENGTH,
                    "tokens_per_second": now.tokens_per_second,
                    "seconds": time.perf_counter() - begin - looking,
                }
                show(now.step, f"loss {now.loss / np.log(2):.2f} bits/byte, {now.tokens_per_second:,.0f} bytes/s")
                last = now.step == recipe.steps or budget.left < learner.seconds_per_look + 1
                if last or any(place <= now.step for place in places):
                    places = {place for place in places if place > now.step}
                    look = time.perf_counter()
                    bits = training.evaluate(learner.model, unseen, LENGTH, batch=SCORED_AT_ONCE)
                    looking += time.perf_counter() - look
                    point = {"tokens": record["tokens"], "seconds": record["seconds"]}
                    record["curve"].append(point | {"validation_bits_per_byte": bits})
                    record["validation_bits_per_byte"] = bits
                if last:
                    break
        record["finished"] = record["steps"] == recipe.steps
    finally:  # whoever interrupts keeps what was learned
        if record["steps"]:
            where = folder / learner.mixer
            settings = {"sizes": learner.model.sizes, "seed": recipe.seed, "text_sha256": sha256}
            checkpoints.save(where, record["steps"], nnx.state(learner.model, nnx.Param), settings)
            record["checkpoint"] = f"{folder.name}/{learner.mixer}"
    display.line(f"{title}: {record['validation_bits_per_byte']:.3f} bits per unseen byte in {record['steps']} steps")


def sample(
    part: dict[str, Any],
    trained: dict[str, models.CausalLM],
    text: data.Text,
    seed: int,
    budget: Budget,
    display: Display,
) -> None:
    """Let each model go on from the start of the unseen tenth; `part` gets `prompt` and `samples`."""
    unseen = data.split(text.tokens)[1]
    prompt = bytes(unseen[: min(LENGTH, len(unseen) // 2)]).decode(errors="ignore")  # no halves of characters
    part |= {"prompt": printable(prompt), "temperature": TEMPERATURE, "bytes": SAMPLE_BYTES}
    tokens = np.frombuffer(prompt.encode(), np.uint8)
    longest = 0.0
    for mixer, model in trained.items():
        if budget.left < longest:
            return
        begin = time.perf_counter()
        with display.bar(f"{MIXERS[mixer]} writes", None):
            key = jax.random.key(seed)
            drawn = models.sample(model, tokens, SAMPLE_BYTES, key, temperature=TEMPERATURE, length=LENGTH)
        written = bytes(drawn.astype(np.uint8)).decode(errors="replace")
        part["samples"].append({"mixer": mixer, "text": printable(written)})
        longest = max(longest, time.perf_counter() - begin)
    part["finished"] = bool(trained)


def printable(text: str) -> str:
    """Text without the control characters that a page cannot show.

    Example:
        >>> printable("one\\ttwo\\nthree\\x00")
        'one\\ttwo\\nthree\\ufffd'
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text.replace("\r\n", "\n"))
