"""The predicted peak is that of steps on real ranks whose gradients hold it: those of micro-batches before, and those
that are cast when all are there."""

from __future__ import annotations

from typing import Any

import pytest
from accumulated_peak_cases import CASES
from check_peak import check_peak
from dtensor_support import TAKES_GRADIENTS
from launch import launch, selected
from thinned import every


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("accumulated_peak_cases.py", 2, cases=selected(request))


@pytest.mark.parametrize("case", every(2, CASES[2]))
def test_peak_is_the_predicted_one(ranks: list[dict[str, Any]], case: str) -> None:
    if case in ("tp, 1", "tp, cast") and not TAKES_GRADIENTS:
        pytest.skip("torch 2.11 copies gradients of DTensors, each of which is there twice for a moment")
    # a weight's cast gradient is counted as if what its op read still lived
    over = 0.025 if case in ("tp, bf16", "tp, cast") else 1e-5
    for rank in ranks:
        check_peak(rank[case], under=1e-5, over=over)
