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

LENGTH, BATCH = training.Recipe(1).length, training.Recipe(1).batch
EVERY = 5  # steps of one model before it is the next one's turn
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
        part: the results, see `Course` for those of a model.
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
    courses = [Course(learner, reading, recipe) for learner in learners]
    part["models"] += [course.record for course in courses]
    try:
        take_turns(courses, recipe, looks, unseen, budget, display)
    finally:  # whoever interrupts keeps what was learned
        for course in courses:
            course.save(folder, recipe, text.sha256)
    for course in courses:
        bits, steps = course.record["validation_bits_per_byte"], course.record["steps"]
        display.line(f"{MIXERS[course.learner.mixer]}: {bits:.3f} bits per unseen byte after {steps} steps")
    part["finished"] = len(courses) == len(mixers) and all(course.record["finished"] for course in courses)
    return {course.learner.mixer: course.learner.model for course in courses}


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
    # A second each to save a checkpoint; a pace that was measured for a second is not kept for a minute.
    left = 0.8 * budget.left - looks * looking - len(learners)
    steps = max(1, int(left / sum(learner.seconds_per_step for learner in learners)))
    return training.Recipe(steps, BATCH, LENGTH, seed=seed, warmup=min(20, steps // 10)), looks


class Course:
    """The training of one model, step by step.

    `record` is its place in the results: `parameters`, `steps` of `steps_planned`, `tokens` read, `seconds_to_prepare`
    (draw parameters, compile), `seconds` of training alone, `tokens_per_second`, `curve`, and the last of its
    `validation_bits_per_byte`.
    """

    def __init__(self, learner: Learner, reading: np.ndarray, recipe: training.Recipe) -> None:
        self.learner = learner
        every = EVERY if recipe.steps >= 8 * EVERY else 1
        self.progress = training.train(learner.model, reading, recipe, report_every=every)
        self.record: dict[str, Any] = {
            "mixer": learner.mixer,
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

    def advance(self) -> training.Progress:
        """Some steps further."""
        begin = time.perf_counter()
        now = next(self.progress)
        self.record |= {
            "steps": now.step,
            "tokens": now.step * BATCH * LENGTH,
            "tokens_per_second": now.tokens_per_second,
            "seconds": self.record["seconds"] + time.perf_counter() - begin,
            "finished": now.step == now.steps,
        }
        return now

    def look(self, unseen: np.ndarray) -> None:
        """Predict the text that is not trained on."""
        bits = training.evaluate(self.learner.model, unseen, LENGTH, batch=SCORED_AT_ONCE)
        point = {name: self.record[name] for name in ("tokens", "seconds")}
        self.record["curve"].append(point | {"validation_bits_per_byte": bits})
        self.record["validation_bits_per_byte"] = bits

    def save(self, folder: pathlib.Path, recipe: training.Recipe, sha256: str) -> None:
        """Write a checkpoint of the parameters reached."""
        if self.record["steps"]:
            model = self.learner.model
            settings = {"sizes": model.sizes, "seed": recipe.seed, "text_sha256": sha256}
            where = folder / self.learner.mixer
            checkpoints.save(where, self.record["steps"], nnx.state(model, nnx.Param), settings)
            self.record["checkpoint"] = f"{folder.name}/{self.learner.mixer}"


def take_turns(
    courses: list[Course], recipe: training.Recipe, looks: int, unseen: np.ndarray, budget: Budget, display: Display
) -> None:
    """Train all models side by side, so that they have read the same whenever time is up.

    A busy machine, too, then slows all alike. They look at the unseen text after 1/2ⁿ, …, 1/4, 1/2 and all steps.
    """
    places = {max(1, recipe.steps >> n) for n in range(looks)}
    looking = sum(course.learner.seconds_per_look + 1 for course in courses)  # a second each to save it
    last, took = False, 0.0
    with display.bar("training", recipe.steps) as show:
        while not last:
            begin = time.perf_counter()
            for course in courses:
                now = course.advance()
                bits = f"{now.loss / np.log(2):.2f} bits/byte, {now.tokens_per_second:,.0f} bytes/s"
                show(now.step, f"{MIXERS[course.learner.mixer]}: {bits}")
            took = max(took, time.perf_counter() - begin)
            last = now.step == recipe.steps or budget.left < looking + took
            if last or any(place <= now.step for place in places):
                places = {place for place in places if place > now.step}
                for course in courses:
                    course.look(unseen)
                    stop_if_asked()


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
