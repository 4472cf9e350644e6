"""Cases of which a part runs unmarked and the rest is slow: of a grid so that each value of each parameter runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(one_of: int, *values: Sequence[Any]) -> list[Any]:
    """All combinations of the parameters' values; one of so many is not slow, a diagonal (Latin squares).

    The parameters beside any one must have enough values for that.

    >>> [(case.values, bool(case.marks)) for case in thinned(2, "ab", [1, 2])]
    [(('a', 1), False), (('a', 2), True), (('b', 1), True), (('b', 2), False)]
    """
    steps = [len(some) - 1 for some in values]
    assert sum(steps) - max(steps) >= one_of - 1, "some value would never run"
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if sum(places) % one_of else [])
        for case, places in zip(
            itertools.product(*values), itertools.product(*(range(len(some)) for some in values)), strict=True
        )
    ]


def every(one_of: int, cases: Iterable[Any]) -> list[Any]:
    """All cases; every so many-th is not slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] if i % one_of else []) for i, case in enumerate(cases)]
