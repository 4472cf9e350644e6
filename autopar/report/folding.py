"""Turns rows with module paths into an indented tree in which equal numbered siblings are one line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Row = TypeVar("Row", bound=Hashable)


@dataclass(frozen=True)
class Line(Generic[Row]):
    """One line of the tree: a module, a row in it, or both if the row is all that the module contains.

    `label`: the module, "" for a row on a line of its own. `row`: None for a module on a line of its own. `repeats`:
    the number of equal blocks that the line stands for.
    """

    depth: int
    label: str
    row: Row | None
    repeats: int = 1


@dataclass
class _Module(Generic[Row]):
    """The contents of one module in order of first use: rows, and names of submodules."""

    entries: list[Row | str] = field(default_factory=list)
    is_row: list[bool] = field(default_factory=list)
    inside: dict[str, _Module[Row]] = field(default_factory=dict)

    def signature(self) -> Hashable:
        return tuple(
            entry if row else (entry, self.inside[str(entry)].signature())
            for entry, row in zip(self.entries, self.is_row, strict=True)
        )


def fold(
    rows: Iterable[tuple[str, Row]], join: Callable[[Row, Row], Row | None] = lambda a, b: None
) -> list[Line[Row]]:
    """The tree of `rows`, pairs (dotted module path, row); adjacent numbered siblings with equal contents fold.

    `join` merges two neighbouring rows of a module into one, or returns None to keep both.

    >>> rows = [("wte", "embedding")] + [(f"h.{i}.mlp", "linear") for i in range(12)]
    >>> for line in fold(rows):
    ...     print("  " * line.depth + line.label, line.row, f"x{line.repeats}")
    wte embedding x1
    h.{0-11}.mlp linear x12
    """
    root: _Module[Row] = _Module()
    for path, row in rows:
        module = root
        for name in path.split(".") if path else []:
            if name not in module.inside:
                module.inside[name] = _Module()
                module.entries.append(name)
                module.is_row.append(False)
            module = module.inside[name]
        joined = join(module.entries[-1], row) if module.entries and module.is_row[-1] else None  # type: ignore[arg-type]
        if joined is not None:
            module.entries[-1] = joined
        else:
            module.entries.append(row)
            module.is_row.append(True)
    return _lines(root, 0, 1)


def _lines(module: _Module[Row], depth: int, repeats: int) -> list[Line[Row]]:
    lines: list[Line[Row]] = []
    position = 0
    while position < len(module.entries):
        entry = module.entries[position]
        if module.is_row[position]:
            lines.append(Line(depth, "", entry, repeats))  # type: ignore[arg-type]
            position += 1
            continue
        names = _run(module, position)
        position += len(names)
        label, times = ranges(list(map(int, names))) if len(names) > 1 else str(entry), len(names)
        below = _lines(module.inside[names[0]], depth + 1, repeats * times)
        if all(line.depth > depth + 1 for line in below[1:]):  # the module contains one thing: both on one line
            full = f"{label}.{below[0].label}" if below[0].label else label
            lines.append(Line(depth, full, below[0].row, below[0].repeats))
            lines += [Line(line.depth - 1, line.label, line.row, line.repeats) for line in below[1:]]
        else:
            lines.append(Line(depth, label, None, repeats * times))
            lines += below
    return lines


def _run(module: _Module[Row], position: int) -> list[str]:
    """The longest run of numbered siblings, starting at `position`, with equal contents."""
    names = [str(module.entries[position])]
    if not names[0].isdigit():
        return names
    signature = module.inside[names[0]].signature()
    for entry, is_row in zip(module.entries[position + 1 :], module.is_row[position + 1 :], strict=True):
        if is_row or not str(entry).isdigit() or module.inside[str(entry)].signature() != signature:
            break
        names.append(str(entry))
    return names


def ranges(numbers: list[int]) -> str:
    """
    >>> ranges([0, 1, 2, 5, 6]), ranges([7])
    ('{0-2,5,6}', '7')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return "{" + ",".join(f"{a}-{b}" if b > a + 1 else ",".join(map(str, range(a, b + 1))) for a, b in parts) + "}"
