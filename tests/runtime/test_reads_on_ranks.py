"""Forward reads more than inputs and registered tensors: losses and gradients equal one process."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, selected
from read_cases import CASES


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("read_cases.py", 2, cases=selected(request), timeout_seconds=600)


@pytest.mark.parametrize("case", CASES[2])
def test_as_in_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
        assert rank[case]["value"] < 1e-12
