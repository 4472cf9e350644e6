"""Models whose dims no number of ranks divides train as in one process: all ranks begin their collectives alike."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from launch import launch
from ragged_cases import CASES


@functools.cache
def found(ranks: int) -> list[dict[str, Any]]:
    return launch("ragged_cases.py", ranks)


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        pytest.param(ranks, scheme, marks=pytest.mark.slow if ranks == 4 else ())
        for ranks, some in CASES.items()
        for scheme in some
    ],
)
def test_equals_one_process(ranks: int, scheme: str) -> None:
    for rank in found(ranks):
        assert "error" not in rank[scheme], rank[scheme]["traceback"]
        assert rank[scheme]["value"] < 1e-12
