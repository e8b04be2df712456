"""On the same text, with the same number of parameters, what do attention and a scanned RNN each give, and cost?

Method: check `attention` against others; train the models on the same bytes and let them predict the last tenth of the
text; time single layers and count their dependent steps; train on associative recall; let the models write.
Output: the folder `--out` with `results.json`, `index.html`, plots and a checkpoint of each model, valid after every
part, and the answer on stdout; with `--json` the content of `results.json` instead. In it `validation_bits_per_byte`,
`seconds`, `tokens` (bytes), `tokens_per_second`; times in `_ms`, lengths in `_tokens`; chains in `steps`.

    attention-jax compare --budget 60 --out report
"""

import argparse
import datetime
import pathlib
import shlex
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import data
from . import learning, remembering, sentences, stopping, timing, verify
from .budget import Budget, shared
from .console import InputError, as_json, say, show
from .devices import describe
from .display import Display
from .report import CHECKPOINTS, Report

WEIGHTS = {"train": 51, "time": 16, "recall": 26, "sample": 7}  # of the time; in the order of `sentences.PARTS`
# What a part takes at least, since it compiles, in units of the time that a language model takes to be prepared.
PREPARING = {"train": 0.0, "time": 1.0, "recall": 0.7, "sample": 0.3}
TO_END = 0.6  # to draw the last plots and leave, in units of the time that the part "verify" takes


def run(options: argparse.Namespace) -> int:
    """Do the job; 0, or 1 where numbers disagree with those of others."""
    budget = Budget(options.budget - (time.perf_counter() - options.begun))
    text = _text(options.text)
    report = Report(pathlib.Path(options.out), _header(options, text))
    job = _Job(report, text, list(dict.fromkeys(options.mixers)), options.seed, Display())

    def write(*changed: str) -> None:
        report.results["run"]["elapsed_seconds"] = time.perf_counter() - options.begun
        report.write(*changed)

    part = ""
    try:
        with stopping.heeded():
            write()
            for part, work in job.parts(budget):
                stopping.stop_if_asked()
                started = time.perf_counter()
                work()
                report.results["parts"][part]["seconds"] = time.perf_counter() - started
                write(part)
            stopping.stop_if_asked()
        report.results["finished"] = True
    except KeyboardInterrupt:
        report.results["interrupted"] = True
        raise
    finally:
        with stopping.undisturbed():
            write(part)
            _tell(options.json, report)
    return 0 if _agree(report.results["parts"]) else 1


class _Job:
    """The parts of the main job, each filling its place in the results."""

    def __init__(self, report: Report, text: data.Text, mixers: list[str], seed: int, display: Display) -> None:
        self.report, self.text, self.mixers, self.seed, self.display = report, text, mixers, seed, display
        self.models: dict[str, Any] = {}

    def parts(self, budget: Budget) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name and work of each part that there is time for."""
        begin = time.perf_counter()
        yield "verify", self.verify
        budget = Budget(budget.left - TO_END * (time.perf_counter() - begin))
        for name, own in shared(budget, WEIGHTS):
            models = self.report.results["parts"].get("train", {}).get("models", [])
            preparing = max((model["seconds_to_prepare"] for model in models), default=0.0)
            if budget.left <= PREPARING[name] * preparing:
                continue
            yield name, lambda name=name, own=own: getattr(self, name)(own)

    def begin(self, name: str, **lists: list[Any]) -> dict[str, Any]:
        """A part with nothing in it, in its place."""
        return self.report.results["parts"].setdefault(name, {"finished": False, **lists})

    def verify(self) -> None:
        self.report.results["parts"]["verify"] = {"finished": True, **verify.verify()}

    def train(self, budget: Budget) -> None:
        part, folder = self.begin("train", models=[]), self.report.folder / CHECKPOINTS
        self.models = learning.train(part, self.text, self.mixers, self.seed, budget, self.display, folder)

    def time(self, budget: Budget) -> None:
        part = self.begin("time", chains=[], checks=[], timings=[], ratios=[])
        timing.time_layers(part, self.seed, budget, self.display)

    def recall(self, budget: Budget) -> None:
        remembering.remember(self.begin("recall", models=[]), self.mixers, self.seed, budget, self.display)

    def sample(self, budget: Budget) -> None:
        learning.sample(self.begin("sample", samples=[]), self.models, self.text, self.seed, budget, self.display)


def _text(files: list[str] | None) -> data.Text:
    try:
        return data.load_text(files)
    except ValueError as error:
        raise InputError(f"--text: {error}") from None


def _header(options: argparse.Namespace, text: data.Text) -> dict[str, Any]:
    started = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    about = {"command": f"attention-jax {shlex.join(options.words)}", "seed": options.seed}
    times = {"budget_seconds": options.budget, "elapsed_seconds": 0.0, "started": started}
    return {
        "run": {**about, **times, "device": describe()},
        "text": {"name": text.name, "size_bytes": text.size_bytes, "sha256": text.sha256},
    }


def _agree(parts: dict[str, Any]) -> bool:
    checks = [check for name in ("verify", "time") for check in parts.get(name, {}).get("checks", [])]
    return all(check["passed"] for check in checks)


def _tell(json: bool, report: Report) -> None:
    page = report.folder / "index.html"
    state = sentences.state(report.results)
    answer = [*sentences.opening(report.results), *([state] if state else []), f"Report: {page}"]
    show(as_json(report.results) if json else "\n".join(answer))
    say(f"attention-jax: {report.results['run']['elapsed_seconds']:.0f} s; the report is {page}")
