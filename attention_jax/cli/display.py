"""Progress for the person who waits, on stderr: a bar per task while it runs, a line for each result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .stopping import stop_if_asked


class Display:
    """Bars and lines on stderr. Without a terminal the bars are left out and the lines stay."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False)

    @contextmanager
    def bar(self, title: str, total: float | None) -> Iterator[Callable[..., None]]:
        """A bar while the block runs; the function it gives takes how much is done, and what to say beside the bar.

        Both are places where a job that was asked to stop does so. Without a `total` the bar only says that something
        is being done.
        """
        says = TextColumn("{task.fields[says]}", markup=False)
        columns = (TextColumn("{task.description:<24}", markup=False), BarColumn(32), says, TimeElapsedColumn())
        stop_if_asked()
        hidden = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as progress:
            task = progress.add_task(title, total=total, says="")

            def show(done: float, says: str = "") -> None:
                stop_if_asked()
                progress.update(task, completed=done, says=says)

            yield show
