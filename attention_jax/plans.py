"""What will run, and why: the answer of `plan`."""

import dataclasses
from typing import final

from .kernels.call import Cost, Operands


@final
@dataclasses.dataclass(frozen=True)
class Plan:
    """What `attention` would run; print it.

    Attributes:
        implementation: the kernel that was chosen.
        differentiated: the kernel that takes its place where the call is differentiated; mostly the same.
        refused: the reason why each other kernel was not.
        operands: shapes and dtypes of q, k, v and bias, with a head axis in any case.
        cost: FLOPs and predicted peak bytes, forward and for the gradient.
    """

    implementation: str
    differentiated: str
    refused: dict[str, str]
    operands: Operands
    cost: Cost

    @property
    def tiles(self) -> tuple[int, int] | None:
        """How many tiles are computed, of how many; None for a kernel without tiles."""
        return self.cost.tiles

    def __str__(self) -> str:
        same = self.differentiated == self.implementation
        rows = [("implementation", self.implementation + ("" if same else f"; differentiated: {self.differentiated}"))]
        rows += [(f"not {name}", reason) for name, reason in self.refused.items()]
        rows += [
            (letter, f"{x.dtype}{list(x.shape)}") for letter, x in self.operands._asdict().items() if x is not None
        ]
        cost = self.cost
        if cost.tiles is not None:
            rows.append(("tiles", f"{cost.tiles[0]} of {cost.tiles[1]}"))
        rows += [
            ("forward", f"{_count(cost.flops)}FLOP, peak {_bytes(cost.peak_bytes)}"),
            ("gradient", f"{_count(cost.gradient_flops)}FLOP, peak {_bytes(cost.gradient_peak_bytes)}"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _count(n: int | float) -> str:
    power = min(len(f"{n:.0f}") - 1, 14) // 3
    return f"{n / 1000**power:.3g} {' kMGT'[power].strip()}"


def _bytes(n: int | float) -> str:
    return f"{n / 2**20:.1f} MiB"
