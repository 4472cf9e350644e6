"""Values that forward reads of tensors, and rows that masks select, on two ranks: results equal one process."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch
from read_number_cases import CASES


@pytest.fixture(scope="module")
def report() -> list[dict[str, Any]]:
    return launch("read_number_cases.py", 2)


@pytest.mark.parametrize("case", CASES[2])
def test_as_in_one_process(case: str, report: list[dict[str, Any]]) -> None:
    for rank in report:
        assert "error" not in rank[case], rank[case]["traceback"]
        found = rank[case]["value"]
        assert found["worst"] < 1e-10
        assert found["kinds"] == ["float", "float", "int", "bool", "float"]
        assert found["noted"][0] == pytest.approx(found["noted"][1], rel=1e-6)
        if case in ("ddp", "fsdp", "own rows"):
            assert found["split"] > 10
