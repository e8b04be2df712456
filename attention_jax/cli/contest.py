"""Several implementations of one thing, timed in turn: what `bench` does with each point of its parts.

Nobody's time is taken before its numbers agree with the reference's. Then all run once per round, so that a machine
which is busy for a while is busy for all of them; median and quartiles over the rounds count. A pause between two calls
lets the threads of the first go to sleep.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .memory import temporaries
from .stopping import stop_if_asked

Arrays = Sequence[np.ndarray]
Row = dict[str, Any]
WARM_UP = 2  # rounds that do not count
PAUSE = 0.01  # seconds before each call: the threads of the one before spin for some milliseconds (libgomp: 3-5)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contestant at one point, ready to run.

    Attributes:
        run: one call, waited for.
        numbers: what a call returned, as the reference lays it out.
        facts: `compile_s` and `temporary_bytes`, as far as they are known.
    """

    run: Callable[[], Any]
    numbers: Callable[[Any], Arrays]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class NotSupported(Exception):
    """A contestant cannot do this point; its text says why."""


def jitted(fn: Callable[..., Any], *args: Any, numbers: Callable[[Any], Arrays] | None = None) -> Entry:
    """An entry that is compiled here, without a cache, so that the time it takes is known."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        begin = time.perf_counter()
        lowered = jax.jit(fn).lower(*args)
        compiled = lowered.compile()
        seconds = time.perf_counter() - begin
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
    facts = {"compile_s": seconds, "temporary_bytes": temporaries(lowered)}
    return Entry(lambda: jax.block_until_ready(compiled(*args)), numbers or as_arrays, facts)


def as_arrays(result: Any) -> Arrays:
    """All arrays of a tree, in float64."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(result)]


def hold(
    enter: Mapping[str, Callable[[], Entry]],
    expected: Mapping[str, Callable[[], Arrays]],
    tolerance: float,
    rounds: int,
) -> list[Row]:
    """Check all contestants and time those whose numbers agree.

    Args:
        enter: makes the entry of each contestant, by name.
        expected: what each must return, by name, as far as there is something to compare with.
        tolerance: the largest difference, as a share of the largest number of an array.
        rounds: that count.

    Returns:
        One row each: `contestant` with `median_ms`, `lower_quartile_ms`, `upper_quartile_ms`, or with `why_not`.
    """
    rows, entries = {}, {}
    for name, make in enter.items():
        stop_if_asked()
        rows[name] = {"contestant": name}
        try:
            entry = make()
            got = entry.numbers(entry.run())
        except NotSupported as refused:
            rows[name]["why_not"] = str(refused)
            continue
        except Exception as error:  # one that breaks, on memory perhaps, must not end the contest of the others
            said = (str(error).splitlines() or [""])[0]
            rows[name] |= {"why_not": f"{type(error).__name__}: {said}"[:60], "wrong": True}
            continue
        rows[name] |= entry.facts
        if not all(np.isfinite(array).all() for array in got):
            rows[name] |= {"why_not": "not finite", "wrong": True}
            continue
        if name in expected:
            rows[name]["largest_difference"] = worst = difference(got, expected[name]())
            if not worst <= tolerance:
                rows[name] |= {"why_not": f"differs by {worst:.0e}", "largest_difference": repr(worst), "wrong": True}
                continue
        entries[name] = entry
    for name, taken in take_turns({name: entry.run for name, entry in entries.items()}, rounds).items():
        rows[name] |= quartiles(taken)
    return list(rows.values())


def quartiles(taken: Sequence[float]) -> dict[str, float]:
    """The median of times in milliseconds, and their quartiles, as rows have them."""
    low, middle, high = (float(ms) for ms in np.percentile(taken, (25, 50, 75)))
    return {"median_ms": middle, "lower_quartile_ms": low, "upper_quartile_ms": high}


def difference(got: Arrays, expected: Arrays) -> float:
    """The largest difference of two lists of arrays, each as a share of the array's largest number."""
    worst = 0.0
    for mine, theirs in zip(got, expected, strict=True):
        if mine.shape != theirs.shape:
            return math.inf
        worst = max(
            worst, float(np.abs(mine - theirs).max(initial=0)) / max(float(np.abs(theirs).max(initial=0)), 1e-9)
        )
    return worst


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Call each once per round, each round beginning with another one; milliseconds by name."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + rounds):
        stop_if_asked()
        names = list(calls)
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            time.sleep(PAUSE)
            begin = time.perf_counter()
            calls[name]()
            if turn >= WARM_UP:
                taken[name].append(1e3 * (time.perf_counter() - begin))
    return taken


def ratios(rows: Sequence[Row], base: str) -> dict[tuple[str, str, str], float]:
    """Times over that of `base`, by (point, direction, contestant), where both were timed."""
    times = {(row["point"], row["direction"], row["contestant"]): row.get("median_ms") for row in rows}
    found = {}
    for (point, direction, name), ms in times.items():
        ours = times.get((point, direction, base))
        if name != base and ms is not None and ours is not None:
            found[point, direction, name] = ms / ours
    return found


def means(rows: Sequence[Row], base: str) -> dict[tuple[str, str], tuple[float, int]]:
    """The geometric mean of `ratios` and their number, by (direction, contestant)."""
    lists: dict[tuple[str, str], list[float]] = {}
    for (_, direction, name), ratio in ratios(rows, base).items():
        lists.setdefault((direction, name), []).append(ratio)
    return {key: (statistics.geometric_mean(values), len(values)) for key, values in lists.items()}
