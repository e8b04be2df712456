"""The main job: what it refuses, what it leaves when it is stopped, and that its parts measure what they say."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from flax import nnx

from attention_jax import checkpoints, data, models
from attention_jax.cli import compare, learning, main, remembering, report, sentences, timing
from attention_jax.cli.budget import Budget
from attention_jax.cli.display import Display

ROOT = pathlib.Path(__file__).parent.parent
TEXT = ("It was the best of times, it was the worst of times, " * 150).encode()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "two cities.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def small(monkeypatch):
    """Models that compile in a moment."""
    tiny = functools.partial(models.CausalLM, width=16, depth=1, heads=2)
    monkeypatch.setattr(learning.models, "CausalLM", tiny)
    monkeypatch.setattr(learning, "LENGTH", 16)
    monkeypatch.setattr(learning, "BATCH", 4)


def read(folder):
    results = json.loads((folder / "results.json").read_text())
    assert results["format"] == report.FORMAT
    page = (folder / "index.html").read_text()
    assert page.endswith("</html>")
    assert not list(folder.glob("*.part"))
    return results, page


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "must be readable"),
        (b"", "must not be empty"),
        (b"\xff\xfe" * 4000, "must be UTF-8"),
        (b"short", "too short"),
    ],
)
def test_a_text_that_cannot_be_used_is_status_2_and_no_folder(content, said, tmp_path, capsys):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert main(["compare", "--text", str(path), "--out", str(tmp_path / "report")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "attention-jax: --text: " in printed.err
    assert said in printed.err
    assert not (tmp_path / "report").exists()


def test_a_bad_text_leaves_an_earlier_report_as_it_is(tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps({"format": report.FORMAT}))
    assert main(["compare", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert json.loads((tmp_path / "results.json").read_text()) == {"format": report.FORMAT}


def test_a_folder_that_cannot_be_written_is_status_2_before_any_work(text, monkeypatch, capsys):
    monkeypatch.setattr(compare._Job, "verify", lambda self: pytest.fail("work has begun"))
    assert main(["compare", "--text", str(text), "--out", str(text / "report")]) == 2
    assert "cannot be written" in capsys.readouterr().err


CHECK = {"line": "full", "case": "a", "against": "b", "tolerance": 1.0, "largest_difference": 0.0, "passed": True}


def only(monkeypatch, *parts):
    """Leave out the other parts, and make the rest small."""
    monkeypatch.setattr(compare, "WEIGHTS", dict.fromkeys(parts, 1))
    monkeypatch.setattr(compare.verify, "verify", lambda: {"checks": [CHECK]})
    monkeypatch.setattr(timing, "LENGTHS", (16, 32))
    monkeypatch.setattr(timing, "CHAIN_LENGTHS", (4, 8))
    monkeypatch.setattr(timing, "WIDTH", 16)
    monkeypatch.setattr(timing, "_compiled", lambda layer, direction, x: lambda: None)
    monkeypatch.setattr(remembering, "PAIRS", (2, 3))
    monkeypatch.setattr(remembering, "STEPS", 2)
    monkeypatch.setattr(remembering, "WIDTH", 16)
    monkeypatch.setattr(learning, "SAMPLE_BYTES", 8)
    recipe = learning.training.Recipe(12, batch=4, length=16)
    monkeypatch.setattr(learning, "plan", lambda learners, budget, seed: (recipe, 2))


def interrupt(monkeypatch, owner, name, call):
    """Let the given call of a function (1 for the first) be met by a Ctrl-C."""
    real, calls = getattr(owner, name), []

    def stopped(*args, **options):
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(owner, name, stopped)


@pytest.mark.parametrize(
    ("parts", "owner", "name", "call", "left"),
    [
        (["train"], learning.training, "evaluate", 6, {"models": 2}),
        (["time"], timing, "take_turns", 2, {"timings": 6, "checks": 4}),
        (["recall"], remembering, "_run", 2, {"models": 2}),
        (["train", "sample"], learning.models, "sample", 2, {"samples": 1}),
    ],
)
def test_an_interrupt_in_any_part_leaves_what_is_done_and_status_130(
    parts, owner, name, call, left, small, text, tmp_path, monkeypatch, capsys
):
    only(monkeypatch, *parts)
    interrupt(monkeypatch, owner, name, call)
    folder = tmp_path / "report"
    words = ["compare", "--text", str(text), "--out", str(folder), "--budget", "900", "--mixers", "gru", "elman"]
    assert main(words) == 130
    results, page = read(folder)
    assert results["interrupted"] is True
    assert results["finished"] is False
    part = results["parts"][parts[-1]]
    assert part["finished"] is False
    assert {key: len(part[key]) for key in left} == left
    assert "This run was interrupted." in page
    assert "interrupted" in capsys.readouterr().err
    if parts == ["train"]:
        for model in part["models"]:
            assert 0 < model["steps"] < model["steps_planned"]
            assert checkpoints.newest(folder / model["checkpoint"]) == model["steps"]
        assert [len(model["curve"]) for model in part["models"]] == [1, 0]


@pytest.mark.slow
def test_a_whole_run_finishes_every_part_and_its_checkpoints_can_be_read(small, text, tmp_path, monkeypatch, capsys):
    only(monkeypatch, *compare.WEIGHTS)
    folder = tmp_path / "report"
    words = ["compare", "--text", str(text), "--out", str(folder), "--mixers", "linear", "elman", "linear"]
    assert main([*words, "--seed", "3", "--budget", "900", "--json"]) == 0
    results, page = read(folder)
    assert json.loads(capsys.readouterr().out) == results
    assert results["finished"] is True
    assert {name: part["finished"] for name, part in results["parts"].items()} == dict.fromkeys(sentences.PARTS, True)
    assert "This run did not" not in page
    assert results["text"]["sha256"] in page
    assert results["run"]["seed"] == 3
    for name in report.plots.PLOTS:
        for theme in ("light", "dark"):
            assert (folder / f"{name}-{theme}.png").read_bytes().startswith(b"\x89PNG")
    train = results["parts"]["train"]
    assert [model["mixer"] for model in train["models"]] == ["linear", "elman"]
    reading, unseen = data.split(data.load_text(text).tokens)
    assert train["validation_bytes"] == len(unseen)
    assert train["bigram_bits_per_byte"] == data.ngram_bits(reading, unseen, 2)
    for model in train["models"]:
        assert model["curve"][-1]["validation_bits_per_byte"] == model["validation_bits_per_byte"]
        where = folder / model["checkpoint"]
        settings = checkpoints.settings_of(where)
        assert settings["text_sha256"] == results["text"]["sha256"]
        assert checkpoints.newest(where) == model["steps"] == model["steps_planned"]
        fresh = models.CausalLM(**settings["sizes"], rngs=nnx.Rngs(9))
        nnx.update(fresh, checkpoints.restore(where, nnx.state(fresh, nnx.Param)))
        bits = learning.training.evaluate(fresh, unseen, learning.LENGTH)
        assert bits == pytest.approx(model["validation_bits_per_byte"], abs=1e-4)


def test_a_wrong_layer_is_seen_and_not_timed(small, text, tmp_path, monkeypatch, capsys):
    only(monkeypatch, "time")
    honest = timing._recur
    monkeypatch.setattr(
        timing, "_recur", lambda cell: lambda params, x: honest(cell)(params, x) * (1.01 if cell == "gru" else 1)
    )
    assert main(["compare", "--text", str(text), "--out", str(tmp_path / "report"), "--budget", "900"]) == 1
    part = read(tmp_path / "report")[0]["parts"]["time"]
    assert [check["layer"] for check in part["checks"] if not check["passed"]] == ["gru"]
    assert {row["layer"] for row in part["timings"]} >= {"lstm", "attention 1 head"}
    assert "gru" not in {row["layer"] for row in part["timings"] + part["ratios"]}


def test_a_short_budget_is_kept_and_says_what_was_not_reached(small, text, tmp_path, monkeypatch, capsys):
    only(monkeypatch, *compare.WEIGHTS)
    begin = time.perf_counter()
    assert main(["compare", "--text", str(text), "--out", str(tmp_path), "--budget", "3", "--mixers", "gru"]) == 0
    results, page = read(tmp_path)
    assert time.perf_counter() - begin < 60
    assert results["finished"] is True
    assert "ran out of its budget" in page


def test_only_the_first_64_kib_of_a_long_unseen_tenth_are_scored(small, monkeypatch):
    asked = []
    monkeypatch.setattr(learning, "LARGEST_VALIDATION", 300)

    def look(courses, recipe, looks, unseen, *args):
        asked.append(len(unseen))
        courses[0].record["validation_bits_per_byte"] = 8.0

    monkeypatch.setattr(learning, "take_turns", look)
    part = {"models": []}
    tokens = np.frombuffer(TEXT, np.uint8)
    learning.train(part, data.Text("t", len(TEXT), "0", tokens), ["gru"], 0, Budget(9), Display(), pathlib.Path())
    assert asked == [300]
    assert part["validation_bytes"] == 300


@pytest.mark.slow
def test_models_have_read_the_same_whenever_time_is_up(small, text, tmp_path, monkeypatch, capsys):
    only(monkeypatch, "train")
    recipe = learning.training.Recipe(10_000, batch=4, length=16)
    monkeypatch.setattr(learning, "plan", lambda learners, budget, seed: (recipe, 1))
    monkeypatch.setattr(learning, "prepare", functools.partial(slower, learning.prepare))
    words = ["compare", "--text", str(text), "--out", str(tmp_path / "report"), "--mixers", "gru", "elman"]
    assert main([*words, "--budget", "12"]) == 0
    part = read(tmp_path / "report")[0]["parts"]["train"]
    first, second = part["models"]
    assert 0 < first["steps"] == second["steps"] < 10_000
    assert first["tokens"] == second["tokens"]
    assert [len(model["curve"]) for model in part["models"]] == [1, 1]
    assert part["finished"] is first["finished"] is False


def slower(prepare, mixer, *args):
    """A pace that says the models differ."""
    learner = prepare(mixer, *args)
    learner.seconds_per_step *= 10 if mixer == "elman" else 1
    return learner


def test_a_japanese_text_is_trained_on_and_continued(small, tmp_path, monkeypatch, capsys):
    only(monkeypatch, "train", "sample")
    path = tmp_path / "kokoro.txt"
    path.write_text("私はその人を常に先生と呼んでいた。" * 200)
    words = ["compare", "--text", str(path), "--out", str(tmp_path / "report"), "--mixers", "gru", "--budget", "900"]
    assert main(words) == 0
    results, page = read(tmp_path / "report")
    prompt = results["parts"]["sample"]["prompt"]
    assert prompt
    assert "\ufffd" not in prompt
    assert prompt in page


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_real_job_leaves_a_valid_report_and_status_130(sent, tmp_path):
    line = [sys.executable, "-m", "attention_jax", "compare", "--budget", "120", "--out", str(tmp_path / "report")]
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    begin = time.perf_counter()
    while not (tmp_path / "report" / "results.json").exists() and time.perf_counter() - begin < 100:
        time.sleep(0.2)
    time.sleep(8)
    process.send_signal(sent)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.endswith("attention-jax: interrupted\n")
    results, page = read(tmp_path / "report")
    assert results["interrupted"] is True
    assert "This run was interrupted." in page


@pytest.mark.slow
def test_a_real_run_ends_near_its_budget_with_a_report_on_the_manual(tmp_path):
    line = [sys.executable, "-m", "attention_jax", "compare", "--budget", "45", "--out", str(tmp_path / "report")]
    begin = time.perf_counter()
    ran = subprocess.run(
        line,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert time.perf_counter() - begin < 90  # other work may hold the processors
    results, _ = read(tmp_path / "report")
    assert "reference manual of Python" in results["text"]["name"]
    assert results["parts"]["train"]["models"][0]["mixer"] == "attention"
