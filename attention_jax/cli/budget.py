"""How the time of a job is shared between its parts."""

import os
import time
from collections.abc import Iterator, Mapping


def seconds_since_start() -> float:
    """How long ago this process was started, as far as the system tells; else 0."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as stat, open("/proc/uptime", encoding="utf-8") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])  # since the machine was started
            return max(0.0, float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):  # not Linux
        return 0.0


class Budget:
    """Wall clock that is left, of a job or of a part of it.

    Args:
        seconds: from now on.

    Example:
        >>> Budget(60).over, Budget(0).over
        (False, True)
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end; never negative."""
        return max(0.0, self.end - time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left == 0

    def part(self, share: float) -> "Budget":
        """The budget of a part that may take this share of what is left.

        Example:
            >>> 14 < Budget(60).part(0.25).left <= 15
            True
        """
        return Budget(self.left * share)


def shared(budget: Budget, weights: Mapping[str, float]) -> Iterator[tuple[str, Budget]]:
    """Each part with its budget when its turn comes: what a part leaves over goes to those after it.

    Example:
        >>> [(name, round(part.left)) for name, part in shared(Budget(60), {"one": 1, "two": 2})]
        [('one', 20), ('two', 60)]
    """
    waiting = sum(weights.values())
    for name, weight in weights.items():
        yield name, budget.part(weight / waiting)
        waiting -= weight
