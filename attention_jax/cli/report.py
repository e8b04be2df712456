"""A report folder: `results.json`, and a page and plots made from it, valid after every part of the job.

Each file takes the place of the one before it whole, so a reader, or a kill, never meets half a file.
"""

import json
import pathlib
import shutil
from typing import Any

import jinja2

from . import folders, names, plots, sentences
from .console import InputError, as_json

FORMAT = "attention_jax report 1"
CHECKPOINTS = "checkpoints"


class Report:
    """The results of a run, and the folder that shows them.

    Args:
        folder: made if it is not there; what an earlier run left in it is replaced.
        header: what is known before the work starts (`run`, `text`).

    Raises:
        InputError: the folder cannot be written, or holds a page that is not a report.
    """

    def __init__(self, folder: pathlib.Path, header: dict[str, Any]) -> None:
        self.folder = folder
        claim(folder)
        self.results: dict[str, Any] = {
            "format": FORMAT,
            "finished": False,
            "interrupted": False,
            **header,
            "parts": {},
        }
        self.drawn: set[str] = set()
        try:
            clear(folder)
        except OSError as error:
            raise InputError(f"--out {folder}: {error.filename} cannot be replaced ({error.strerror})") from None

    def write(self, *changed: str) -> None:
        """Bring the folder up to date with `results`; plots are drawn anew for the parts that have changed."""
        _write(self.folder / "results.json", as_json(self.results) + "\n")
        self.drawn |= set(plots.draw(self.results, self.folder, changed))
        _write(self.folder / "index.html", page(self.results, self.drawn))


def claim(folder: pathlib.Path) -> None:
    """Make sure that a report can be written to `folder`, and replaces nothing but a report."""
    folders.claim(folder)
    made_by_others = [name for name in ("results.json", "index.html", CHECKPOINTS) if (folder / name).exists()]
    if made_by_others and not _is_report(folder):
        raise InputError(
            f"--out {folder}: it holds {made_by_others[0]}, which is not of a report; choose another folder"
        )


def clear(folder: pathlib.Path) -> None:
    """Remove what an earlier run left, so that no old plot or checkpoint stands beside new numbers."""
    for mixer in names.MIXERS:
        shutil.rmtree(folder / CHECKPOINTS / mixer, ignore_errors=True)
    drawn = [f"{plot}-{theme.name}.png" for plot in plots.PLOTS for theme in plots.THEMES]
    for name in (*drawn, "index.html", "results.json"):  # the last one says whose the folder is
        (folder / name).unlink(missing_ok=True)


def page(results: dict[str, Any], drawn: set[str]) -> str:
    """The page of a report.

    Args:
        results: the content of `results.json`, of a run that may have ended at any point.
        drawn: the plots that stand in the folder.
    """
    loader = jinja2.PackageLoader("attention_jax.cli")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": names.count, "figure": names.figure, "size": names.size}
    parts = {name: results["parts"].get(name) for name in sentences.PARTS}
    return environment.get_template("report.html").render(
        results,
        results=results,
        parts=parts,
        drawn=drawn,
        say=sentences,
        MIXERS=names.MIXERS,
        LAYERS=names.LAYERS,
        COLOURS=names.COLOURS,
    )


def _is_report(folder: pathlib.Path) -> bool:
    try:
        return json.loads((folder / "results.json").read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(path: pathlib.Path, text: str) -> None:
    with folders.replaced(path) as half:
        half.write_text(text, encoding="utf-8")
