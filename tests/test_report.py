"""The page of a run: its sentences follow the numbers, and it can be drawn after any part, finished or not."""

import copy
import json
import pathlib

import pytest

from attention_jax.cli import plots, report, sentences
from attention_jax.cli.console import InputError

BIGRAM, TRIGRAM = 3.34, 2.53


def model(mixer, bits, **facts):
    curve = [{"tokens": 1000 * 2**n, "seconds": 2.0**n, "validation_bits_per_byte": bits + 2 - n} for n in range(3)]
    known = {"mixer": mixer, "parameters": 1000, "validation_bits_per_byte": bits, "tokens": 4000, "seconds": 4.0}
    known |= {"tokens_per_second": 1000.0, "steps": 20, "steps_planned": 20, "finished": True, "curve": curve}
    return known | {"seconds_to_prepare": 1.0} | facts


def learned(*models):
    text = {"bigram_bits_per_byte": BIGRAM, "trigram_bits_per_byte": TRIGRAM, "validation_bytes": 400}
    return {"finished": True, "models": list(models), "context_length_tokens": 128, "batch_windows": 16, **text}


def timed(gru_ms=2.0, flax_ms=3.0, passed=True):
    where = {"direction": "forward", "length_tokens": 64}
    spread = {"lower_quartile_ms": 1.0, "upper_quartile_ms": 4.0, "repeats": 5}
    times = {"attention 8 heads": 1.0, "gru": gru_ms, "flax gru": flax_ms}
    steps = {"attention 8 heads": (14, 14), "gru": (160, 640)}
    ratio = gru_ms if gru_ms <= flax_ms else None
    return {
        "finished": True,
        "batch_sequences": 4,
        "width": 128,
        "chain_lengths_tokens": [16, 64],
        "chains": [
            {"layer": layer, "direction": direction, "length_tokens": length, "steps": number, "exact": True}
            for layer, numbers in steps.items()
            for direction in ("forward", "forward and backward")
            for length, number in zip((16, 64), numbers, strict=True)
        ],
        "checks": [{"layer": "gru", "against": "GRU of Flax", "passed": passed}],
        "timings": [{"layer": layer, "median_ms": ms, **where, **spread} for layer, ms in times.items()],
        "ratios": [{"layer": "gru", **where, "time_over_attention": ratio}],
    }


def remembered(attention=1.0, gru=0.1):
    runs = {"attention": attention, "gru": gru}
    return {
        "finished": True,
        "chance_accuracy": 1 / 16,
        "layers": 2,
        "width": 64,
        "batch_sequences": 64,
        "models": [
            {"mixer": mixer, "parameters": 100, "runs": [{"pairs": 8, "accuracy": share, "steps": 9, "seconds": 1.0}]}
            for mixer, share in runs.items()
        ],
    }


def whole():
    check = {"line": "causal / official", "case": "the example", "against": "torch", "tolerance": 1e-12}
    device = {"device": "a CPU", "platform": "cpu", "cpu_cores": 2, "system": "Linux", "python": "3.11.7"}
    run = {"command": "attention-jax compare", "seed": 7, "budget_seconds": 60, "elapsed_seconds": 50.0}
    return {
        "format": report.FORMAT,
        "finished": True,
        "interrupted": False,
        "run": {**run, "started": "2026-01-01", "device": {**device, "versions": {"jax": "1.2.3"}}},
        "text": {"name": "<b>novel</b>.txt", "size_bytes": 4096, "sha256": "abc123"},
        "parts": {
            "verify": {"finished": True, "checks": [{**check, "largest_difference": 0.0, "passed": True}]},
            "train": learned(model("attention", 2.4), model("gru", 2.2)),
            "time": timed(),
            "recall": remembered(),
            "sample": {
                "finished": True,
                "prompt": "The",
                "samples": [{"mixer": "gru", "text": " <script>alert(1)</script>"}],
            },
        },
    }


def begun(part):
    """The same part as it is when it has just begun."""
    emptied = copy.deepcopy(part) | {"finished": False}
    return emptied | {name: [] for name, value in emptied.items() if isinstance(value, list) and name != "checks"}


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("cut", [False, True])
def test_a_page_can_be_made_after_any_part(number, cut, tmp_path):
    results = whole()
    results["parts"] = dict(list(results["parts"].items())[:number])
    if cut and number:
        last = list(results["parts"])[-1]
        results["parts"][last] = begun(results["parts"][last])
    results["interrupted"] = cut
    drawn = plots.draw(results, tmp_path, results["parts"])
    page = report.page(results, set(drawn))
    assert page.endswith("</html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}-{theme}.png" for name in drawn for theme in ("light", "dark")
    )
    assert all(f'src="{name}-light.png"' in page for name in drawn)
    assert ("This run" in sentences.state(results)) == (number < 5 or cut)
    assert ("was interrupted" in page) == cut
    assert page.count("This run did not get to this part.") >= 5 - number


@pytest.mark.parametrize(("bigram", "bits"), [(0.1, 0.01), (7.0, 0.2), (0.1, 7.9), (3.3, 2.2)])
def test_models_and_tables_are_inside_the_picture_whatever_the_text(bigram, bits):
    part = learned(model("attention", bits)) | {"bigram_bits_per_byte": bigram}
    for axes in plots.learning(part, plots.THEMES[0]).axes:
        low, high = axes.get_ylim()
        assert all(low < level < high for level in (bigram, TRIGRAM, bits))


def test_the_figures_stand_beside_text_hash_device_versions_and_seed():
    page = report.page(whole(), set())
    for fact in (
        "4,096 bytes",
        "abc123",
        "a CPU",
        "jax 1.2.3",
        "<dd>7</dd>",
        "attention-jax compare",
        "60 s; used 50 s",
    ):
        assert fact in page


def test_what_a_model_writes_cannot_become_part_of_the_page():
    page = report.page(whole(), set())
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>novel" not in page


@pytest.mark.parametrize(("bits", "learned_it"), [(BIGRAM + 0.5, False), (BIGRAM, False), (BIGRAM - 0.1, True)])
def test_a_model_no_better_than_byte_pairs_has_not_learned_in_this_budget(bits, learned_it):
    said = " ".join(sentences.learning(learned(model("attention", 2.0), model("gru", bits))))
    assert (f"GRU: {sentences.NOT_LEARNED}" in said) != learned_it
    assert "Attention: " not in said
    assert "Attention does better than counting byte triples (2.53)" in said
    assert ("GRU does better than counting byte pairs (3.34), and not yet than triples (2.53)." in said) == learned_it


def test_models_that_are_level_are_not_ranked():
    assert sentences.best([model("attention", 2.410), model("gru", 2.400)]) == (
        "GRU (2.40) and attention (2.41) predict equally well, in bits per unseen byte."
    )
    assert sentences.best([model("attention", 2.6), model("gru", 2.4)]) == (
        "GRU predicts best, with 2.40 bits per unseen byte, before attention (2.60)."
    )
    assert sentences.best([model("attention", 2.2), model("gru", 2.4)]).startswith("Attention predicts best")


def test_parameters_are_called_equal_only_as_far_as_they_are():
    results = whole()
    assert "1,000 parameters each (within 1 %)" in sentences.opening(results)[0]
    results["parts"]["train"]["models"][1]["parameters"] = 1100
    assert "(within 11 %)" in sentences.opening(results)[0]


def test_a_layer_slower_than_that_of_flax_gets_no_ratio():
    assert "GRU takes, beside attention with 8 heads, 2 times as long" in " ".join(sentences.speed(timed()))
    said = " ".join(sentences.speed(timed(gru_ms=4.0)))
    assert "times as long" not in said
    assert "No ratio is given for GRU" in said


def test_a_layer_whose_numbers_disagree_is_named():
    assert "GRU: no time is shown, since its numbers disagree with GRU of Flax." in sentences.speed(timed(passed=False))


def test_growth_is_read_off_the_steps():
    said = sentences.order(timed())
    assert said == [
        "Attention, 8 heads: 14 steps at every length.",
        "GRU: 160 steps at T = 16, 640 at T = 64, growing in step with the length.",
    ]


def test_recall_is_learned_from_95_percent_on():
    assert sentences.recall(remembered(0.95, 0.94)) == [
        "Attention gives the right answer to 95 % at 8 pairs.",
        f"GRU gives the right answer to 94 % at 8 pairs: {sentences.NOT_LEARNED}.",
        "Guessing gives 6 %.",
    ]


def test_wrong_numbers_are_said_before_anything_else_is_believed():
    part = whole()["parts"]["verify"]
    part["checks"][0]["passed"] = False
    assert sentences.agreement(part) == ["The numbers do not agree: 1 of 1 checks differ, against torch."]


@pytest.mark.parametrize("name", ["results.json", "index.html", "checkpoints"])
def test_a_folder_with_something_else_of_the_same_name_is_left_alone(name, tmp_path):
    path = tmp_path / name
    if name == "checkpoints":
        path.mkdir()
        path = path / "attention"
    path.write_text("precious")
    with pytest.raises(InputError, match=rf"--out .*{name}, which is not of a report"):
        report.Report(tmp_path, {})
    assert path.read_text() == "precious"


@pytest.mark.parametrize("where", ["file", "file/below", "/proc/report"])
def test_a_folder_that_cannot_be_written_is_an_error_that_says_why(where, tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(InputError, match="cannot be written"):
        report.Report(tmp_path / where, {})


def test_a_new_report_keeps_nothing_of_the_one_before_and_leaves_other_files(tmp_path):
    results = whole()
    header = {name: results[name] for name in ("run", "text")}
    first = report.Report(tmp_path, header)
    first.results["parts"] = results["parts"]
    first.write("train", "recall")
    old = tmp_path / report.CHECKPOINTS / "gru" / "20"
    old.mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    assert (tmp_path / "recall-dark.png").exists()
    report.Report(tmp_path, header).write()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "index.html",
        "notes.txt",
        "results.json",
    ]
    assert not old.exists()
    assert json.loads((tmp_path / "results.json").read_text())["parts"] == {}


def test_a_folder_in_the_place_of_the_page_is_an_error_that_says_which(tmp_path):
    results = whole()
    header = {name: results[name] for name in ("run", "text")}
    report.Report(tmp_path, header).write()
    (tmp_path / "index.html").unlink()
    (tmp_path / "index.html").mkdir()
    with pytest.raises(InputError, match=r"index\.html cannot be replaced"):
        report.Report(tmp_path, header)


def test_plots_are_drawn_anew_only_for_parts_that_changed(tmp_path):
    results = whole()
    made = report.Report(tmp_path, {name: results[name] for name in ("run", "text")})
    made.results["parts"] = results["parts"]
    made.write("train")
    before = (tmp_path / "learning-light.png").stat().st_mtime_ns
    made.write("recall")
    assert (tmp_path / "learning-light.png").stat().st_mtime_ns == before
    assert "learning-light.png" in (tmp_path / "index.html").read_text()
    assert not list(pathlib.Path(tmp_path).glob("*.part"))
