"""`attention-jax bench`: numbers first, then time; each in its turn; what is printed and written."""

import dataclasses
import errno
import json
import os

import numpy as np
import pytest
from matplotlib.figure import Figure

from attention_jax.cli import bench, bench_attention, contest, main, peers, timing
from attention_jax.cli.contest import Entry, NotSupported


def entry(number):
    return lambda: Entry(lambda: number, lambda result: [np.full(3, float(result))])


def refusing():
    raise NotSupported("not for this")


def breaking():
    raise MemoryError("too large")


def test_nobody_is_timed_before_its_numbers_agree():
    enter = {"right": entry(1), "wrong": entry(1.1), "nan": entry(np.nan), "unable": refusing, "broken": breaking}
    rows = contest.hold(enter, dict.fromkeys(enter, lambda: [np.ones(3)]), 1e-2, rounds=3)
    right, wrong, nan, unable, broken = rows
    assert right["median_ms"] >= 0
    assert right["largest_difference"] == 0
    for row in (wrong, nan, unable, broken):
        assert "median_ms" not in row
    assert (wrong["why_not"], nan["why_not"], unable["why_not"]) == ("differs by 1e-01", "not finite", "not for this")
    assert broken["why_not"] == "MemoryError: too large"
    assert wrong["wrong"]
    assert nan["wrong"]
    assert broken["wrong"]
    assert "wrong" not in unable


def test_what_is_not_finite_gets_no_time_where_there_is_nothing_to_compare_with_either():
    (row,) = contest.hold({"nan": entry(np.nan)}, {}, 0.0, rounds=1)
    assert row["why_not"] == "not finite"
    assert row["wrong"]
    assert "median_ms" not in row


def test_the_largest_difference_is_a_share_of_the_largest_number_and_a_wrong_shape_is_infinite():
    assert contest.difference([np.array([3.0, 0.0])], [np.array([4.0, 0.0])]) == pytest.approx(0.25)
    assert contest.difference([np.zeros((2, 1))], [np.zeros(2)]) == np.inf


def test_contestants_take_turns_and_the_first_of_a_round_changes():
    calls = []
    taken = contest.take_turns({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abcbcacababc"
    assert {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2, "c": 2}


def test_ratios_and_their_geometric_mean_leave_out_who_has_no_time():
    rows = [
        {"point": point, "direction": "forward", "contestant": name, "median_ms": ms}
        for point, name, ms in (("p", "us", 2.0), ("p", "them", 4.0), ("q", "us", 1.0), ("q", "them", 8.0))
    ]
    rows.append({"point": "q", "direction": "forward", "contestant": "late", "why_not": "no"})
    assert contest.ratios(rows, "us") == {("p", "forward", "them"): 2.0, ("q", "forward", "them"): 8.0}
    assert contest.means(rows, "us") == {("forward", "them"): (pytest.approx(4.0), 2)}


@pytest.mark.parametrize("mask", ["full", "causal", "window", "segments"])
@pytest.mark.parametrize("direction", ["forward", "forward and backward"])
def test_every_peer_agrees_with_the_formula(mask, direction):
    point = peers.Point(2, 4, 2, 300, 8, mask, direction)
    for name in (peers.OURS, *peers.installed()):
        if name != "flax":  # which has no grouped heads
            made = peers.enter(name, point)
            assert contest.difference(made.numbers(made.run()), peers.expected(point)) < 1e-4, name


def test_a_point_shows_the_mask_that_its_name_says():
    window, packed = (peers.Point(1, 1, 1, 512, 8, mask).visible for mask in ("window", "segments"))
    assert window is not None
    assert packed is not None
    assert window[0, 0].sum(-1).max() == window[0, 0, 400].sum() == peers.WINDOW
    assert packed[0, 0, 63].sum() == 64
    assert packed[0, 0, 64].sum() == 1


def test_the_grid_is_twenty_points_and_two_beside_it_both_ways():
    points = bench_attention.grid(None, None, "float32")
    assert len(points) == 2 * 22 + 1
    assert len({(point.name, point.direction) for point in points}) == len(points)
    assert [point.mask for point in bench_attention.grid([(1, 1, 1, 8, 4)], ["window"], "float32")] == ["window"] * 2


def test_bench_of_attention_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    words = ["bench", "--shapes", "1x4/2x48x8", "--masks", "causal", "--rounds", "2", "--out", str(tmp_path / "new")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "new" / "attention.json").read_text())
    assert "1×4/2×48×8 causal" in printed
    assert "no grouped heads" in printed
    ours = [row for row in results["rows"] if row["contestant"] == results["base"]]
    assert [row["direction"] for row in ours] == ["forward", "forward and backward"]
    for row in ours:
        assert row["lower_quartile_ms"] <= row["median_ms"] <= row["upper_quartile_ms"]
        assert row["implementation"] == "dense"
        assert row["limit_ms"] > 0
        assert row["compile_s"] > 0
        assert row["temporary_bytes"] > 0
    assert (tmp_path / "new" / "attention.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rnn", "lm"])
def test_layers_and_language_models_are_timed_after_the_same_rules(what, capsys, monkeypatch):
    monkeypatch.setattr(bench.bench_rnn, "LENGTHS", (16,))
    monkeypatch.setattr(bench.bench_lm, "BATCHES", ((2, 32),))
    assert main(["bench", "--what", what, "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["direction"] for row in rows} == set(
        ("forward", "forward and backward") if what == "rnn" else ("training step",)
    )
    for row in rows:
        assert row["median_ms"] > 0, row
        if what == "rnn":
            assert row["largest_difference"] < 1e-3


def test_numbers_of_ours_that_disagree_are_status_1(capsys, monkeypatch):
    honest = peers.expected
    monkeypatch.setattr(peers, "expected", lambda point: [2 * array for array in honest(point)])
    assert main(["bench", "--shapes", "1x1x8x4", "--masks", "full", "--rounds", "1"]) == 1
    assert "differs by 5e-01" in capsys.readouterr().out


def test_any_layer_of_ours_that_disagrees_is_status_1(capsys, monkeypatch):
    layers = {name: layer for name, layer in timing.layers(0).items() if name in ("gru", "lstm")}
    gru = layers["gru"]
    layers["gru"] = dataclasses.replace(gru, apply=lambda params, x: 2 * gru.apply(params, x))
    monkeypatch.setattr(timing, "layers", lambda seed: layers)
    monkeypatch.setattr(bench.bench_rnn, "LENGTHS", (16,))
    assert main(["bench", "--what", "rnn", "--rounds", "1", "--json"]) == 1
    wrong = {row["contestant"] for row in json.loads(capsys.readouterr().out)["rows"] if row.get("wrong")}
    assert wrong == {"GRU"}


@pytest.mark.parametrize(
    "words",
    [
        *(["--shapes", "8x64"], ["--shapes", "1x3/2x8x4"], ["--rounds", "0"], ["--what", "x"]),
        *(["--what", "rnn", "--dtype", "bfloat16"], ["--what", "lm", "--shapes", "1x1x8x4"]),
        ["--what", "lm", "--masks", "full"],
    ],
)
def test_wrong_input_is_refused_in_one_line(words, capsys):
    assert main(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_disk_that_is_full_at_the_end_is_said_in_one_line(tmp_path, capsys, monkeypatch):
    def full(figure, half, **_):
        half.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    assert main(["bench", "--shapes", "1x1x8x4", "--masks", "full", "--rounds", "1", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert f"attention.png cannot be written ({os.strerror(errno.ENOSPC)})" in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["attention.json"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err
