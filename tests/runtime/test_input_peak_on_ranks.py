"""Of a batch two tensors exist: the batch as given, and the rank's shard in the compute dtype."""

from __future__ import annotations

from typing import Any

import pytest
from check_peak import check_peak
from input_peak_cases import CASES
from launch import launch, selected


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("input_peak_cases.py", 2, cases=selected(request))


@pytest.mark.parametrize("case", [case for case in CASES[2] if case != "gradient"])
def test_peak_is_the_predicted_one(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        check_peak(rank[case], under=1e-5, over=1e-5)


@pytest.mark.parametrize("case", ["gradient"])
def test_gradient_of_a_cast_input(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "value" in rank[case], rank[case]
        found = rank[case]["value"]
        assert found["dtype"] == "torch.float32"
        assert found["error"] < 1e-2  # precision of bfloat16
