"""The predicted peak matches steps on real ranks where blocks of attention are recomputed."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from launch import launch, selected
from recompute_peak_cases import CASES

UNDER, OVER = 0.003, 0.05  # fractions by which a step may exceed the prediction, and be below it


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("recompute_peak_cases.py", 2, cases=selected(request), timeout_seconds=300)


QUICK = (
    "llama, ddp",
    "llama, fsdp, shared buckets",
    "llama, fsdp, adapters",
    "gpt2, tp, shared buckets",
    "gpt2, parts of blocks",
)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES[2]])
def test_peak(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=UNDER, over=OVER)
