"""`attention-jax memory`: the arithmetic, and that what is measured grows as it must."""

import json

import pytest

from attention_jax.cli import main, memory


def test_the_scores_of_a_head_in_two_bytes_are_those_of_the_article(capsys):
    assert main(["memory"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sizes = [line.split("  ")[0] for line in lines]
    assert "bfloat16" in lines[0]
    assert len({len(line) for line in lines[1:]}) == 1, "aligned"
    assert sizes[0].startswith("1 × 1 heads")
    for line, size in zip(lines[2:], ("2 MB", "128 MB", "2.048 GB"), strict=True):
        assert [cell for cell in line.split("  ") if cell][1].strip() == size


def test_memory_as_json_grows_as_it_must(capsys):
    assert main(["memory", "--json", "--heads", "2", "--dtype", "float32", "--lengths", "4096", "8192"]) == 0
    results = json.loads(capsys.readouterr().out)
    short, long = results["rows"]
    assert results["device"]["platform"] == "cpu"
    assert short["scores"] == 2 * 4096**2 * 4
    for name in ("definition", "definition_gradient"):
        assert short[name] >= short["scores"]
        assert 3.5 <= long[name] / short[name] <= 4.5
    for name in ("tiled", "tiled_gradient"):
        assert long[name] <= 2 * short[name] < short["definition"]
    assert 3.5 <= long["flop"] / short["flop"] <= 4
    assert long["gradient_flop"] > 2 * long["flop"]


@pytest.mark.parametrize("words", [["--lengths", "0"], ["--heads", "-1"], ["--dtype", "int8"], ["--lengths"]])
def test_wrong_input_is_refused_in_one_line(words, capsys):
    assert main(["memory", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(("number", "text"), [(999, "999 B"), (2_000_000, "2 MB"), (2_048_000_000, "2.048 GB")])
def test_bytes_are_decimal(number, text):
    assert memory.with_unit(number, "B") == text
