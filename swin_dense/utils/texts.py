"""Tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of the same number of cells as lines whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ('  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return '\n'.join(line.rstrip() for line in lines)
