"""Tables in Markdown, for the pages of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table.

    >>> markdown(["name", "s"], [["a|b", "2"]])
    ['| name | s |', '| --- | --- |', '| a\\\\|b | 2 |']
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
