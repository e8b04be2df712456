"""A mask as a picture: blocks in a terminal, squares in a notebook."""

import dataclasses
import html
from typing import final

import numpy as np

CELLS = 48  # at most this many rows and columns are drawn; a larger mask is drawn by tiles
FULL, PART, EMPTY = "█", "▒", "·"


@final
@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawn mask: `print` it, or let a notebook show it.

    Attributes:
        allowed: booleans, `(T, S)`.
        title: the expression that was drawn.
    """

    allowed: np.ndarray
    title: str

    def __str__(self) -> str:
        share, rows, columns = self._shares()
        queries, keys = self.allowed.shape
        margin = len(str(max(queries - 1, 0)))
        lines = [self.title, f" {'':>{margin}} keys 0-{keys - 1}" if keys else " no keys"]
        for n, row in enumerate(share):
            cells = "".join(FULL if s == 1 else PART if s else EMPTY for s in row)
            lines.append(f" {n * rows:>{margin}} {cells}")
        if rows > 1 or columns > 1:
            legend = f"{FULL} all, {PART} some, {EMPTY} none"
            lines.append(f" {'':>{margin}} each cell is {rows} × {columns} pairs: {legend}")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        share, rows, columns = self._shares()
        side = max(4, 240 // max(1, *share.shape))
        squares = "".join(
            f'<rect x="{x * side}" y="{y * side}" width="{side - 1}" height="{side - 1}" '
            f'fill="#3b6fb6" fill-opacity="{0.08 + 0.92 * s:.2f}"/>'
            for (y, x), s in np.ndenumerate(share)
        )
        height, width = (n * side for n in share.shape)
        note = "" if rows == columns == 1 else f"; each square is {rows} × {columns} pairs"
        return (
            f'<figure><svg width="{width}" height="{height}" role="img">{squares}</svg>'
            f"<figcaption><code>{html.escape(self.title)}</code>: queries downwards, keys to the right{note}"
            "</figcaption></figure>"
        )

    def _shares(self) -> tuple[np.ndarray, int, int]:
        """Share of allowed pairs in each drawn cell, and the rows and columns that a cell stands for."""
        queries, keys = self.allowed.shape
        rows, columns = max(1, -(-queries // CELLS)), max(1, -(-keys // CELLS))
        shares = [
            [self.allowed[i : i + rows, j : j + columns].mean() for j in range(0, keys, columns)]
            for i in range(0, queries, rows)
        ]
        return np.asarray(shares, float).reshape(-(-queries // rows), -(-keys // columns)), rows, columns
