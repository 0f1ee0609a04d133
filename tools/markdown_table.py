"""Tables in Markdown, for the scripts that write parts of pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a line of titles."""
    lines = [titles, ['---'] * len(titles), *rows]
    return ''.join('| ' + ' | '.join(map(str, cells)) + ' |\n' for cells in lines)
