"""A model with modules that cannot be traced trains on two ranks as in one process: see `leaf_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("leaf_cases.py", 2)


CASES = ["gate", "gate-fsdp", "gate-tp", "gate-saving", "experts", "experts-fsdp"]
CASES += [
    "loop",
    "loop-fsdp",
    "loop-saving",
    "function",
    "function-fsdp",
    "function-saving",
    "criterion",
    "criterion-fsdp",
    "replayed-fsdp",
]


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(case: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "error" not in rank[case], rank[case]["traceback"]
        found = rank[case]["value"]
        assert found["loss"] < 1e-12
        assert found["parameters"] < 1e-11


def test_a_leaf_that_nobody_asked_for_is_told(two: list[dict[str, Any]]) -> None:
    assert two[0]["gate"]["value"]["warnings"] == 1  # one for three equal leaves
    assert two[0]["function"]["value"]["warnings"] == 1
    assert two[0]["experts-fsdp"]["value"]["warnings"] == 0


def test_a_leaf_whose_rows_do_not_meet_is_split(two: list[dict[str, Any]]) -> None:
    assert all(two[0][case]["value"]["factors"] == ["b"] for case in ("loop-fsdp", "loop-saving"))


def test_a_budget_makes_leaves_recompute(two: list[dict[str, Any]]) -> None:
    assert two[0]["gate-saving"]["value"]["recomputed"] > 0


def test_random_numbers_in_a_leaf_are_those_of_all_ranks(two: list[dict[str, Any]]) -> None:
    assert two[0]["equal_masks"].get("value") == 0, two[0]["equal_masks"]


def test_packed_rows_are_those_of_one_process_while_they_are_as_long(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "error" not in rank["packed_rows"], rank["packed_rows"]["traceback"]
        found = rank["packed_rows"]["value"]
        assert found["worst"] < 1e-12
        assert "'packed', which runs as one op, returned a tensor of shape (8, 3, 12)" in found["message"]


def test_a_leaf_that_returns_other_values_than_it_was_traced_with_is_refused(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "error" not in rank["other_pieces"], rank["other_pieces"]["traceback"]
        fewer, longer = rank["other_pieces"]["value"]
        assert "'pieces', which runs as one op, returned 2 values, but was planned with 3" in fewer
        assert "returned a tensor of shape (2, 4), but was planned with (4, 4)" in longer
