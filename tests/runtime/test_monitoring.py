"""What a monitor logs: the work of all ranks, once for each step on rank 0, beside the plan's predictions."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch
from monitor_cases import STEPS


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("monitor_cases.py", 2)


def value(rank: dict[str, Any], case: str) -> Any:
    assert "error" not in rank[case], rank[case]["traceback"]
    return rank[case]["value"]


@pytest.mark.parametrize("inputs", ["global", "local"])
def test_a_line_a_step_on_rank_zero(inputs: str, two: list[dict[str, Any]]) -> None:
    lines = value(two[0], f"words-{inputs}")
    assert value(two[1], f"words-{inputs}") == []
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        assert line["rows_per_s"] * line["seconds"] == pytest.approx(2 * 8, rel=1e-2)  # two micro-batches of 8 rows
        assert line["tokens_per_s"] * line["seconds"] == pytest.approx(2 * 8 * 6, rel=1e-2)
        assert 0 < line["mfu"] < 1
        assert 0 < line["exposed_comm_seconds"] < line["seconds"]
        assert line["predicted_seconds"] > 0
    assert [line["peak_bytes"] is not None for line in lines] == [step == 2 for step in range(STEPS)]
    assert lines[2]["peak_bytes"] == pytest.approx(lines[2]["predicted_peak_bytes"], rel=0.5)


def test_every_second_step_and_a_warning(two: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(two):
        found = value(rank, "numbers")
        assert [line["step"] for line in found["lines"]] == ([1, 3] if number == 0 else [])
        assert all(line["rows_per_s"] * line["seconds"] == pytest.approx(16, rel=1e-2) for line in found["lines"])
        assert all(line["tokens_per_s"] is None for line in found["lines"])
        [told] = found["told"]
        assert told.startswith(f"rank {number}: the peak of a step is ")


def test_a_profile_has_the_plans_names(two: list[dict[str, Any]]) -> None:
    for rank in two:
        names = value(rank, "ranges")
        assert "autopar: call of Net" in names
        assert any(name.startswith("autopar: gather up.weight") for name in names)
        assert any(name.startswith("autopar: reduce up.weight") for name in names)
        assert "autopar: wait for all_gather" in names
