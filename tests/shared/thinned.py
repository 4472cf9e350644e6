"""Subsets of cases to run by default, the others being slow: each value of each parameter runs at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def thinned(one_of: int, *values: Sequence[Any]) -> list[Any]:
    """All combinations of the parameters' values; one in `one_of`, on a diagonal (Latin square), is not slow.

    All parameters but any single one must together have enough values for that.

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
    """All cases; every `one_of`-th is not slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] if i % one_of else []) for i, case in enumerate(cases)]
