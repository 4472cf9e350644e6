"""Every constant of the search and of integer programs says beside it what it bounds or trades."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autopar.solver.linear
import autopar.solver.search

_CONSTANT = re.compile(r"^_?[A-Z][A-Z_]+(, _?[A-Z][A-Z_]+)* = .*[0-9]")
FILES = [
    file
    for package in (autopar.solver.search, autopar.solver.linear)
    for file in sorted(Path(package.__path__[0]).glob("*.py"))
]


def unexplained(text: str) -> list[str]:
    r"""The lines that set numbers without a comment in them or above them, and without a text below.

    >>> unexplained("ONE = 1\n\n# reason\nTWO = 2\nTEN = 10  # reason\nSIX = 6\n'reason'".replace("'", 3 * '"'))
    ['ONE = 1']
    """
    lines = text.splitlines()
    return [
        line
        for i, line in enumerate(lines)
        if _CONSTANT.match(line)
        and "  # " not in line
        and not (i and lines[i - 1].startswith("# "))
        and not (i + 1 < len(lines) and lines[i + 1].startswith('"""'))
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_constant_has_its_reason_beside_it(file: Path) -> None:
    assert unexplained(file.read_text()) == []
