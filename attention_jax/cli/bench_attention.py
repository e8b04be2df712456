"""`attention` against other libraries: many short sequences, few long ones, grouped heads, windows, packed texts."""

import argparse
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import plan
from . import contest, peers
from .display import Display
from .peers import Point

Shape = tuple[int, int, int, int, int]  # B, H, K, T, D

BASE = peers.OURS
OURS = (BASE,)
SHAPES = (
    *((32, 8, 8, 128, 64), (8, 8, 8, 256, 64), (6, 6, 6, 300, 64), (4, 8, 8, 512, 64)),
    *((1, 8, 8, 1024, 64), (1, 8, 8, 2048, 64), (1, 8, 8, 4096, 64), (1, 4, 4, 8192, 64)),
    *((1, 8, 8, 2048, 128), (1, 16, 4, 2048, 64)),
)
MASKS = ("full", "causal")
BESIDE_THE_GRID = ((1, 8, 8, 8192, 64, "window"), (1, 8, 8, 4096, 64, "segments"))
TINY = (1, 1, 1, 16, 16, "full", "not jitted")
DIRECTIONS = ("forward", "forward and backward")
# The largest difference from float32 at highest precision, as a share of the largest number: float32 sums of a few
# thousand terms, and weights and sums that are rounded to 8 bits on the way.
TOLERANCE = {"float32": 1e-3, "bfloat16": 4e-2}


def measure(results: dict[str, Any], options: argparse.Namespace, display: Display) -> None:
    """Fill `results` with the rates of this machine and a row per point, direction and contestant."""
    results["rates"] = rates()
    names = (BASE, *peers.installed())
    points = grid(options.shapes, options.masks, options.dtype)
    with display.bar("attention", len(points)) as show:
        for done, point in enumerate(points):
            show(done, f"{point.name}, {point.direction}")
            enter = {name: lambda name=name, point=point: peers.enter(name, point) for name in names}
            expected = dict.fromkeys(enter, functools.cache(lambda point=point: peers.expected(point)))
            rows = contest.hold(enter, expected, TOLERANCE[point.dtype], options.rounds)
            for row in rows:
                row |= {"point": point.name, "direction": point.direction, "grid": point.mask in MASKS}
            if point.direction != "not jitted":
                rows[0] |= _limit(point, results["rates"])
            results["rows"] += rows
            ms = rows[0].get("median_ms")
            display.line(f"{point.name}, {point.direction}: {f'{ms:.3g} ms' if ms else rows[0].get('why_not')}")


def grid(shapes: Sequence[Shape] | None, masks: list[str] | None, dtype: str) -> list[Point]:
    """The points: those asked for, or all."""
    chosen: list[tuple[*Shape, str]] = [(*shape, mask) for shape in shapes or SHAPES for mask in masks or MASKS]
    if shapes is None and masks is None:
        chosen += BESIDE_THE_GRID
    points = [Point(*each, direction=direction, dtype=dtype) for each in chosen for direction in DIRECTIONS]
    return points if shapes else [*points, Point(*TINY, dtype=dtype)]


def rates() -> dict[str, float]:
    """What this machine reaches in this process, the best of 10: a product of 4096³, and exp(x).sum(-1) of 2^24."""
    x = jnp.ones((4096, 4096), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    exponentials = jax.jit(lambda x: jnp.exp(x).sum(-1))
    return {"flop_per_s": 2 * 4096**3 / _best(product, x), "exp_per_s": 4096**2 / _best(exponentials, x)}


def _best(fn: Any, x: jax.Array) -> float:
    taken = []
    for _ in range(11):  # the first compiles
        begin = time.perf_counter()
        jax.block_until_ready(fn(x))
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _limit(point: Point, measured: dict[str, float]) -> dict[str, Any]:
    """Which kernel runs, and what its pairs take at the rates of this machine: 4 D FLOP and an exponential forward."""
    q, k = (
        jax.ShapeDtypeStruct((point.batch, n, point.length, point.width), jnp.dtype(point.dtype))
        for n in (point.heads, point.kv_heads)
    )
    planned = plan(q, k, k, peers.mask_of(point))
    pairs, both = planned.cost.flops / (4 * point.width + 1), point.direction == "forward and backward"
    seconds = pairs * (14 if both else 4) * point.width / measured["flop_per_s"]
    seconds += pairs * (2 if both else 1) / measured["exp_per_s"]
    name = planned.differentiated if both else planned.implementation
    return {"implementation": name, "limit_ms": 1e3 * seconds}
