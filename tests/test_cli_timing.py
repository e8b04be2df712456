"""Timings of single layers, and the chains of dependent steps of what is timed."""

import functools

from attention_jax.cli import timing
from attention_jax.cli.budget import Budget


def test_a_ratio_is_withheld_where_flax_is_faster_in_the_same_run():
    where = {"direction": "forward", "length_tokens": 64}
    times = {"attention 8 heads": 2.0, "gru": 3.0, "flax gru": 3.1, "lstm": 4.0, "flax lstm": 3.9}
    rows = [{"layer": layer, "median_ms": ms, **where} for layer, ms in times.items()]
    assert timing.ratios(rows) == [
        {"layer": "gru", **where, "time_over_attention": 1.5},
        {"layer": "lstm", **where, "time_over_attention": None},
    ]
    assert timing.ratios([row for row in rows if row["layer"] != "flax gru"])[0]["time_over_attention"] is None


def test_layers_take_turns_and_their_quartiles_stand_beside_the_median():
    calls = []
    rows = timing.take_turns({name: functools.partial(calls.append, name) for name in "ab"}, Budget(0))
    assert calls == ["a", "b"] * timing.LEAST_REPEATS
    assert [row["repeats"] for row in rows] == [timing.LEAST_REPEATS] * 2
    assert all(row["lower_quartile_ms"] <= row["median_ms"] <= row["upper_quartile_ms"] for row in rows)


def test_chains_of_attention_stay_and_those_of_recurrences_grow():
    made = timing.layers(0)
    steps = {n: {(row["layer"], row["direction"]): row for row in timing.chains(made, n)} for n in (16, 64)}
    for (layer, direction), row in steps[64].items():
        grown = row["steps"] / steps[16][layer, direction]["steps"]
        assert row["exact"]
        if layer.startswith("attention"):
            assert grown == 1
        elif layer == "linear associative":
            assert 1 < grown < 2
        else:
            assert 3 < grown <= 4
