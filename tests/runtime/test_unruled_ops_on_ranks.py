"""Discovered rules and mixtures of experts give the results of one process on real ranks: see `unruled_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("unruled_cases.py", 2)


def value(report: dict[str, Any], case: str) -> Any:
    assert "error" not in report[case], report[case]["traceback"]
    return report[case]["value"]


@pytest.mark.parametrize("split", ["rows", "features"])
def test_an_op_whose_rule_was_discovered(split: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = value(rank, f"discovered-{split}")
        assert found["error"] < 1e-12
        assert found["factors"] != [""], "it ran whole"


@pytest.mark.parametrize("kind", ["t", "e", "f"])
def test_experts_split_on(kind: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = value(rank, f"experts-{kind}")
        assert found["error"] < 1e-12
        assert found["factors"] == [kind]


@pytest.mark.parametrize("kind", ["modules", "stack"])
def test_experts_that_the_tokens_of_one_rank_alone_go_to(kind: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = value(rank, f"routed-{kind}")
        assert found["error"] < 1e-12
        assert found["factors"] == ["t"]
