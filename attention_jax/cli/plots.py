"""The pictures of a report, each in a light and a dark version. All numbers come from `results.json`."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from . import folders
from .contest import ratios
from .names import COLOURS, LAYERS, MIXERS, count, mixer_of

Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of one version of a plot; `number` picks from `names.COLOURS`."""

    name: str
    number: int
    ink: str
    faint: str
    paper: str

    def colour(self, mixer: str) -> str:
        """The colour of a mixer."""
        return COLOURS[mixer][self.number]


THEMES = (Theme("light", 0, "#22272e", "#d8dce1", "#ffffff"), Theme("dark", 1, "#d5dae0", "#3b424c", "#161a20"))
DASHES = {
    "attention 1 head": (0, (4, 2)),
    "linear associative": (0, (4, 2)),
    "flax gru": (0, (1, 1.5)),
    "flax lstm": (0, (1, 1.5)),
}
MARKERS = {"attention": "o", "gru": "s", "linear": "D", "lstm": "^", "elman": "v"}


def draw(results: Results, folder: pathlib.Path, parts: Collection[str]) -> list[str]:
    """Draw what `results` hold of some parts into `folder`; the names of the plots, as in `learning-light.png`."""
    drawn = []
    for name, (part, plot) in PLOTS.items():
        if part not in parts or results["parts"].get(part) is None:
            continue
        figures = [(theme, plot(results["parts"][part], theme)) for theme in THEMES]
        for theme, figure in figures:
            if figure is not None:
                save(figure, folder / f"{name}-{theme.name}.png")
        if figures[0][1] is not None:
            drawn.append(name)
    return drawn


def save(figure: Figure, path: pathlib.Path) -> None:
    """Write the picture as a PNG."""
    with folders.replaced(path) as half:
        figure.savefig(half, format="png", dpi=150)


def learning(train: Results, theme: Theme) -> Figure | None:
    """Bits per byte of unseen text against bytes read and against seconds, one line per model."""
    models = [model for model in train["models"] if model["curve"]]
    if not models:
        return None
    figure, (by_bytes, by_seconds) = _panels(theme, 2)
    for model in models:
        bits = [point["validation_bits_per_byte"] for point in model["curve"]]
        for axes, unit, scale in ((by_bytes, "tokens", 1e6), (by_seconds, "seconds", 1)):
            axes.plot([point[unit] / scale for point in model["curve"]], bits, **_line(model["mixer"], theme))
    for axes in (by_bytes, by_seconds):
        for order in ("bigram", "trigram"):
            level = train[f"{order}_bits_per_byte"]
            axes.axhline(level, color=theme.ink, linewidth=0.9, linestyle=(0, (2, 3)))
            axes.text(
                0.99,
                level,
                f"{order} table {level:.2f}",
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="bottom",
                fontsize=8.5,
            )
    by_bytes.set(xlabel="bytes read in training (millions)", ylabel="bits per byte of unseen text")
    by_seconds.set(xlabel="training time (seconds)")
    levels = [train["bigram_bits_per_byte"], train["trigram_bits_per_byte"]]
    ends = levels + [model["curve"][-1]["validation_bits_per_byte"] for model in models]
    begins = [model["curve"][0]["validation_bits_per_byte"] for model in models]
    top = max(*ends, min(5.6, *begins))  # the first steps fall from 8, which would press the rest together
    for axes in (by_bytes, by_seconds):
        axes.set_xlim(left=0)
        axes.set_ylim(min(ends) - 0.25, top + 0.25)
    _legend(figure, by_bytes, theme)
    return figure


def timing(time: Results, theme: Theme) -> Figure | None:
    """Milliseconds against the length T, one line per layer, with the quartiles as bars."""
    if not time["timings"]:
        return None
    directions = list(dict.fromkeys(row["direction"] for row in time["timings"]))
    figure, panels = _panels(theme, len(directions))
    for axes, direction in zip(panels, directions, strict=True):
        for layer in dict.fromkeys(row["layer"] for row in time["timings"]):
            rows = [row for row in time["timings"] if (row["layer"], row["direction"]) == (layer, direction)]
            middle = [row["median_ms"] for row in rows]
            bars = [
                [row["median_ms"] - row["lower_quartile_ms"] for row in rows],
                [row["upper_quartile_ms"] - row["median_ms"] for row in rows],
            ]
            axes.errorbar(
                [row["length_tokens"] for row in rows], middle, yerr=bars, elinewidth=1, **_layer(layer, theme)
            )
        _logarithmic(axes, [row["length_tokens"] for row in time["timings"]])
        axes.set_title(direction, fontsize=10, color=theme.ink)
    panels[0].set_ylabel("milliseconds per call (median)")
    _legend(figure, panels[0], theme)
    return figure


def chains(time: Results, theme: Theme) -> Figure | None:
    """Longest chain of dependent steps against the length T, forward."""
    rows = [row for row in time["chains"] if row["direction"] == "forward"]
    if not rows:
        return None
    figure, (axes,) = _panels(theme, 1)
    for layer in dict.fromkeys(row["layer"] for row in rows):
        points = [(row["length_tokens"], row["steps"]) for row in rows if row["layer"] == layer]
        axes.plot(*zip(*points, strict=True), **_layer(layer, theme))
    _logarithmic(axes, [row["length_tokens"] for row in rows])
    axes.set_ylabel("steps that wait for each other")
    _legend(figure, axes, theme)
    return figure


def recall(part: Results, theme: Theme) -> Figure | None:
    """Share of right answers against the number of pairs."""
    models = [model for model in part["models"] if model["runs"]]
    if not models:
        return None
    figure, (axes,) = _panels(theme, 1)
    for model in models:
        axes.plot(
            [run["pairs"] for run in model["runs"]],
            [run["accuracy"] for run in model["runs"]],
            **_line(model["mixer"], theme),
        )
    axes.axhline(part["chance_accuracy"], color=theme.ink, linewidth=0.9, linestyle=(0, (2, 3)))
    axes.text(
        0.01,
        part["chance_accuracy"],
        "guessing",
        transform=axes.get_yaxis_transform(),
        ha="left",
        va="top",
        fontsize=8.5,
    )
    axes.set(
        xlabel="pairs to remember (the distance from a pair to its question, on average)",
        ylabel="right answers",
        ylim=(0, 1.04),
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xscale("log", base=2)
    _ticks(axes, [run["pairs"] for model in models for run in model["runs"]])
    _legend(figure, axes, theme)
    return figure


def contest(results: Results, theme: Theme) -> Figure | None:
    """Of `bench`: how long the others take over the first contestant, point by point, one marker per contestant."""
    rows = [row for row in results["rows"] if row["direction"] != "not jitted"]
    found, directions = ratios(rows, results["base"]), list(dict.fromkeys(row["direction"] for row in rows))
    points = list(dict.fromkeys(row["point"] for row in rows))
    names = list(dict.fromkeys(name for _, _, name in found))
    if not found:
        return None
    figure, panels = _panels(theme, len(directions))
    figure.set_size_inches(9.2, 1.6 + 0.26 * max(len(points), 4))
    for axes, direction in zip(panels, directions, strict=True):
        for number, (name, marker) in enumerate(zip(names, "os^Dv*XPdhp", strict=False)):
            colour = list(COLOURS.values())[number % len(COLOURS)][theme.number]
            at = [found.get((point, direction, name), math.nan) for point in points]
            axes.plot(at, range(len(points)), marker, color=colour, markersize=5.5, label=name, alpha=0.85)
        axes.axvline(1, color=theme.ink, linewidth=1.1)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(f"time over that of {results['base']}")
        axes.set_title(direction, fontsize=10, color=theme.ink)
    panels[0].set_yticks(range(len(points)), points)
    panels[0].invert_yaxis()
    _legend(figure, panels[0], theme)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Results, Theme], Figure | None]]] = {
    "learning": ("train", learning),
    "timing": ("time", timing),
    "chains": ("time", chains),
    "recall": ("recall", recall),
}


def _panels(theme: Theme, number: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.2, 3.9), facecolor=theme.paper, layout="constrained")
    panels = list(figure.subplots(1, number, squeeze=False, sharey=True)[0])
    for axes in panels:
        axes.set_facecolor(theme.paper)
        axes.grid(color=theme.faint, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=theme.ink, labelsize=9, length=0, which="both")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(theme.faint)
        for text in (axes.xaxis.label, axes.yaxis.label):
            text.set(color=theme.ink, fontsize=9.5)
    return figure, panels


def _legend(figure: Figure, axes: Axes, theme: Theme) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 5 else (len(labels) + 1) // 2
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=9.5,
        handlelength=3,
    )
    for each in figure.axes:
        for text in each.texts:
            text.set_color(theme.ink)


def _line(mixer: str, theme: Theme) -> dict[str, Any]:
    return {
        "color": theme.colour(mixer),
        "marker": MARKERS[mixer],
        "markersize": 4,
        "linewidth": 1.9,
        "label": MIXERS[mixer],
    }


def _layer(layer: str, theme: Theme) -> dict[str, Any]:
    return _line(mixer_of(layer), theme) | {"label": LAYERS[layer], "linestyle": DASHES.get(layer, "-")}


def _logarithmic(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length T of the sequence (tokens)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value) if value >= 1 else f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if high < 10 * low:  # less than a decade would hold one tick or none
        axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    _ticks(axes, lengths)


def _ticks(axes: Axes, places: list[int]) -> None:
    axes.set_xticks(sorted(set(places)), [count(place) for place in sorted(set(places))])
    axes.xaxis.set_minor_locator(NullLocator())
