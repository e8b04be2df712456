"""How fast is this library beside its peers, in one run, on this machine?

Method: `--what attention` gives each contestant the same arrays, `rnn` layers of the same weights against the length,
`lm` a training step of language models of the same size. What disagrees with the reference gets no time. All that agree
run in turn for `--rounds` rounds; the median counts, and quartiles stand beside it.
Output: a line per point and direction: milliseconds of the first contestant with half the distance of its quartiles,
and the times of the others over it, so that 2 means twice as long. With `--out` the folder gets `WHAT.json` and
`WHAT.png`. JSON, also by `--json`: `device`, `rates` of a large product and of exponentials here, and `rows` with
`median_ms`, `lower_quartile_ms`, `upper_quartile_ms`, `compile_s`, `temporary_bytes`, `largest_difference` (a share of
the largest number); `limit_ms`: what the products and exponentials of the computed pairs take at those rates.

    attention-jax bench --what attention --rounds 7 --out bench
"""

import argparse
import pathlib
from typing import Any

from rich.console import Console
from rich.table import Table

from . import bench_attention, bench_lm, bench_rnn, contest, folders, peers, plots, stopping
from .console import InputError, as_json, show
from .devices import describe, versions
from .display import Display

PARTS: dict[str, Any] = {"attention": bench_attention, "rnn": bench_rnn, "lm": bench_lm}


def run(options: argparse.Namespace) -> int:
    """The command; 1 where numbers of ours disagree."""
    part, display = PARTS[options.what], Display()
    _refuse_what_has_no_effect(options)
    options.dtype = options.dtype or "float32"
    settings = {name: getattr(options, name) for name in ("what", "rounds", "dtype")}
    results: dict[str, Any] = {
        "device": describe() | {"peers": versions(peers.OPTIONAL)},
        **settings,
        "base": part.BASE,
        "rows": [],
    }
    folder = pathlib.Path(options.out) if options.out else None
    if folder:
        folders.claim(folder)
    with stopping.heeded():
        try:
            part.measure(results, options, display)
        finally:
            if results["rows"] and folder:
                _write(results, folder)
    show(as_json(results) if options.json else text(results))
    return 1 if any(row.get("wrong") and row["contestant"] in part.OURS for row in results["rows"]) else 0


def _refuse_what_has_no_effect(options: argparse.Namespace) -> None:
    for name in ("dtype", "shapes", "masks"):
        if options.what != "attention" and getattr(options, name) is not None:
            raise InputError(f"bench: --{name} is for --what attention; the sizes of {options.what} are fixed")


def _write(results: dict[str, Any], folder: pathlib.Path) -> None:
    with stopping.undisturbed():
        with folders.replaced(folder / f"{results['what']}.json") as half:
            half.write_text(as_json(results) + "\n", encoding="utf-8")
        figure = plots.contest(results, plots.THEMES[0])
        if figure is not None:
            plots.save(figure, folder / f"{results['what']}.png")


def text(results: dict[str, Any]) -> str:
    """The table, and below it the geometric means."""
    base, rows = results["base"], results["rows"]
    others = [name for name in dict.fromkeys(row["contestant"] for row in rows) if name != base]
    table = Table(title=_title(results), title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (base, *others):
        table.add_column(name, justify="right")
    at = {(row["point"], row["direction"], row["contestant"]): row for row in rows}
    ratios = contest.ratios(rows, base)
    for direction in dict.fromkeys(row["direction"] for row in rows):
        table.add_section()
        table.add_row(direction, style="bold")
        for point in dict.fromkeys(row["point"] for row in rows if row["direction"] == direction):
            cells = [_cell(at.get((point, direction, name)), ratios.get((point, direction, name))) for name in others]
            table.add_row(f"  {point}", _cell(at.get((point, direction, base)), None), *cells)
        means = contest.means([row for row in rows if row.get("grid", True)], base)
        found = [means.get((direction, name)) for name in others]
        if any(mean and mean[1] > 1 for mean in found):
            cells = [f"{mean[0]:.2f}× of {mean[1]}" if mean else "" for mean in found]
            table.add_row("  geometric mean", "", *cells, style="italic")
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _title(results: dict[str, Any]) -> str:
    device = results["device"]
    where = f"{device['device']}, {device['cpu_cores']} cores" if device["platform"] == "cpu" else device["device"]
    packages = (device["versions"] | device["peers"]).items()
    kept = ", ".join(f"{name} {version}" for name, version in packages if name in ("jax", "flax", "torch", "tokamax"))
    return f"{where}; {kept}; {results['dtype']}\n{results['base']} in ms, the others as multiples of it"


def _cell(row: dict[str, Any] | None, ratio: float | None) -> str:
    if row is None:
        return ""
    if "median_ms" not in row:
        return row["why_not"]
    if ratio is not None:
        return f"{ratio:.2f}×"
    spread = (row["upper_quartile_ms"] - row["lower_quartile_ms"]) / 2
    return (
        f"{row['median_ms']:.3g} ± {spread:.2g}"
        if row["median_ms"] < 1000
        else f"{row['median_ms']:.0f} ± {spread:.0f}"
    )
