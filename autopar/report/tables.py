"""Aligned plain-text tables, and numbers as people read them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

WIDTH = 100  # of a report, in columns


def table(
    rows: Sequence[Sequence[str]], align: str, *, head: Sequence[str] = (), indent: int = 2, width: int = WIDTH
) -> list[str]:
    """The lines of a table. `align` has `<` (left) or `>` (right) for each column, `head` their titles.

    If lines would be longer than `width`, the widest `<` column is cut, with an ellipsis.

    >>> print(*table([["a", "1"], ["bcd", "10"]], "<>", indent=0), sep="\\n")
    a     1
    bcd  10
    """
    everything = [list(head), *map(list, rows)] if head else list(map(list, rows))
    if not everything:
        return []
    widths = [max(len(row[i]) for row in everything) for i in range(len(align))]
    over = indent + sum(widths) + 2 * (len(widths) - 1) - width
    if over > 0 and "<" in align:
        column = max((i for i, side in enumerate(align) if side == "<"), key=widths.__getitem__)
        widths[column] = max(widths[column] - over, 12)
    lines = []
    for row in everything:
        cells = [shorten(cell, most) for cell, most in zip(row, widths, strict=True)]
        text = "  ".join(f"{cell:{side}{most}}" for cell, side, most in zip(cells, align, widths, strict=True))
        lines.append((" " * indent + text).rstrip())
    return lines


def shorten(text: str, width: int) -> str:
    """
    >>> shorten("model.layers.0", 8)
    'model.l…'
    """
    return text if len(text) <= width else text[: width - 1] + "…"


def wrap(text: str, first: str, further: str) -> list[str]:
    """Lines of `text`, at most `WIDTH` wide, that begin with `first` and then with `further`."""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=further)


def show_seconds(seconds: float) -> str:
    """
    >>> show_seconds(12.345), show_seconds(0.01234), show_seconds(4.2e-6), show_seconds(0)
    ('12.3 s', '12.3 ms', '4.20 µs', '0 s')
    >>> show_seconds(0.9996), show_seconds(0.9994)
    ('1.00 s', '999 ms')
    """
    if seconds == 0:
        return "0 s"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= 0.9995 * unit:  # 0.9995 rounds to "1.00" of this unit instead of "1,000" of the next
            return f"{significant(seconds / unit)} {name}"
    return f"{seconds / 1e-9:.1f} ns"


def significant(value: float) -> str:
    """The number with at least three significant digits, never in scientific notation.

    >>> significant(1234.5), significant(12.345), significant(1.2345)
    ('1,234', '12.3', '1.23')
    """
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def show_amount(value: float, unit: str) -> str:
    """The number with the unit prefix (powers of 1000) that leaves one to three digits before the point.

    >>> show_amount(2.8e13, "FLOP"), show_amount(1.5e6, "FLOP"), show_amount(12, "FLOP"), show_amount(4e19, "FLOP")
    ('28.0 TFLOP', '1.50 MFLOP', '12.0 FLOP', '40.0 EFLOP')
    >>> show_amount(float("inf"), "B/s")
    'inf B/s'
    """
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if 10**power <= abs(value) < math.inf:
            return f"{significant(value / 10**power)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def show_share(part: float, whole: float) -> str:
    """
    >>> show_share(1, 3), show_share(1, 0)
    ('33.3 %', '')
    """
    return f"{100 * part / whole:.1f} %" if whole else ""
