"""Is our unrolled RNN as fast as Flax's `RNN` of the same cell, forward and forward+backward?

Method: the same weights go into `nnx.RNN`, `linen.RNN` and `unroll`; outputs and gradients must agree, or no time is
shown. Then rounds in which each runs once, in turn, so that a noisy machine is noisy for all; the first rounds warm up.
Forward is outputs; both is the gradient of Σ outputs² by all parameters and x. float32, jitted.

Output: one line per cell, size and direction: the median in ms and the spread (half the range of the middle half)
of each, and `ratio`, the median over rounds of ours / the faster Flax of that round (below 1: we are faster).

    python benchmarks/recurrent_vs_flax.py --rounds 20 --json recurrent.json
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax.recurrent import CELLS, unroll

SIZES = {"wide": (16, 512, 512), "narrow": (32, 256, 128)}  # (batch, T, width of inputs and state)
SEED = 0
LETTERS = {"elman": "", "gru": "rzn", "lstm": "ifgo"}
NNX = {"elman": nnx.SimpleCell, "gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}
LINEN = {"elman": nn.SimpleCell, "gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}

Run = Callable[[Any, jax.Array], jax.Array]


def ours(name: str, params: dict[str, jax.Array]) -> tuple[Run, Any]:
    """(params, x) -> outputs, and params."""
    return lambda params, x: unroll(CELLS[name], params, x)[1], params


def of_nnx(name: str, params: dict[str, jax.Array]) -> tuple[Run, Any]:
    """Likewise; NNX's GRU has no hidden bias, which is zero here."""
    inputs, state = params["input"].shape[0], CELLS[name].state_width(params)
    cell = NNX[name](inputs, state, rngs=nnx.Rngs(0))
    cell.dense_i.kernel[...], cell.dense_h.kernel[...] = params["input"], params["state"]
    (cell.dense_h if name == "lstm" else cell.dense_i).bias[...] = params["bias"]
    graph, values, rest = nnx.split(nnx.RNN(cell), nnx.Param, ...)

    def run(values: Any, x: jax.Array) -> jax.Array:
        h = jnp.zeros((x.shape[0], state))
        return nnx.merge(graph, values, rest)(x, initial_carry=(h, h) if name == "lstm" else h)

    return run, values


def of_linen(name: str, params: dict[str, jax.Array]) -> tuple[Run, Any]:
    """Likewise."""
    if name == "elman":
        tree = {"i": {"kernel": params["input"], "bias": params["bias"]}, "h": {"kernel": params["state"]}}
    else:
        tree = {}
        for side, key in (("i", "input"), ("h", "state")):
            for letter, part in zip(LETTERS[name], jnp.split(params[key], len(LETTERS[name]), axis=1), strict=True):
                tree[side + letter] = {"kernel": part}
        side = "h" if name == "lstm" else "i"
        for letter, part in zip(LETTERS[name], jnp.split(params["bias"], len(LETTERS[name])), strict=True):
            tree[side + letter]["bias"] = part
    if name == "gru":
        tree["hn"]["bias"] = params["state_bias"]
    rnn = nn.RNN(LINEN[name](CELLS[name].state_width(params)))
    return lambda tree, x: rnn.apply({"params": {"cell": tree}}, x), tree


def both(run: Run) -> Callable[[Any, jax.Array], Any]:
    """The gradient of Σ outputs² by (params, x)."""
    return jax.grad(lambda params, x: jnp.sum(jnp.square(run(params, x))), (0, 1))


def disagreement(name: str, runs: dict[str, tuple[Run, Any]], x: jax.Array) -> str:
    """Where outputs or gradients differ, or nothing."""
    results = {}
    for who, (run, params) in runs.items():
        slope, x_slope = jax.jit(both(run))(params, x)
        # one number per leaf order would differ between the three layouts; their squared length does not
        length = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(slope))
        if name == "gru" and who == "nnx":
            length = None  # it lacks the hidden bias
        results[who] = jax.jit(run)(params, x), x_slope, length
    for who in ("nnx", "linen"):
        for what, mine, its in zip(("outputs", "x gradient", "weights"), results["ours"], results[who], strict=True):
            if its is None:
                continue
            error = float(np.max(np.abs(np.asarray(mine) - np.asarray(its))) / np.max(np.abs(np.asarray(its))))
            if not error < 1e-3:
                return f"{name}: {what} differ from {who}'s by {error:.1e} of their largest"
    return ""


def measure(fns: dict[str, Callable[[], Any]], rounds: int, warm: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each, in rounds that run all of them once."""
    times: dict[str, list[float]] = {who: [] for who in fns}
    for turn in range(rounds + warm):
        for who, fn in fns.items():
            start = time.perf_counter()
            jax.block_until_ready(fn())
            if turn >= warm:
                times[who].append(1e3 * (time.perf_counter() - start))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Median and spread of each in ms, and the ratios."""
    row: dict[str, float] = {}
    for who, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        row |= {f"{who}_ms": middle, f"{who}_spread_ms": (high - low) / 2, f"{who}_min_ms": min(values)}
    fastest = [min(pair) for pair in zip(times["nnx"], times["linen"], strict=True)]
    row["ratio"] = statistics.median(a / b for a, b in zip(times["ours"], fastest, strict=True))
    row["ratio_of_minima"] = min(times["ours"]) / min(*times["nnx"], *times["linen"])
    return row


def main() -> int:
    """Prints the table; 1 if numbers disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=NNX, default=list(NNX))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="another T, for a quick look")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    versions = {"jax": jax.__version__, "flax": flax.__version__, "python": platform.python_version()}
    report = {"device": jax.devices()[0].device_kind, "cpus": os.cpu_count(), "versions": versions, "seed": SEED}
    rows = []
    print(f"{'cell':6} {'size':>14} {'':8} {'ours':>14} {'nnx':>14} {'linen':>14} {'ratio':>6} {'of minima':>9}")
    for name in options.cells:
        for batch, steps, width in (SIZES[size] for size in options.sizes):
            steps = options.steps or steps
            x = jax.random.normal(jax.random.key(SEED + 1), (batch, steps, width))
            params = CELLS[name].init(jax.random.key(SEED), width, width)
            runs = {"ours": ours(name, params), "nnx": of_nnx(name, params), "linen": of_linen(name, params)}
            if wrong := disagreement(name, runs, x[:, :64]):
                print(wrong, file=sys.stderr)
                return 1
            for what, change in (("forward", lambda run: run), ("both", both)):
                jitted = {who: jax.jit(change(run)) for who, (run, _) in runs.items()}
                calls = {who: lambda fn=fn, own=runs[who][1], x=x: fn(own, x) for who, fn in jitted.items()}
                row = summary(measure(calls, options.rounds))
                rows.append({"cell": name, "batch": batch, "steps": steps, "width": width, "what": what, **row})
                shown = [f"{row[f'{who}_ms']:7.1f} ±{row[f'{who}_spread_ms']:5.1f}" for who in runs]
                size = f"{batch}x{steps}x{width}"
                last = f"{row['ratio']:6.2f} {row['ratio_of_minima']:9.2f}"
                print(f"{name:6} {size:>14} {what:8} {' '.join(f'{one:>14}' for one in shown)} {last}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
