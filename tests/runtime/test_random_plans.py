"""Random valid plans on N ranks equal one process: strategies, storage and segments are drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch

SMALL, LARGE = ("mlp", "resnet"), ("gpt2", "llama", "bert", "vit", "t5")


def check(report: list[dict[str, Any]], case: str) -> None:
    for rank in report:
        assert "error" not in rank[case], rank[case]["traceback"]
    errors = report[0][case]["value"]
    assert errors and max(errors.values()) < 1e-9, errors


def run(ranks: int, cases: list[str]) -> None:
    report = launch("random_plans.py", ranks, cases=cases, timeout_seconds=800)
    for case in cases:
        check(report, case)


def test_small_models_on_two_ranks() -> None:
    run(2, [f"{name}-2" for name in SMALL])


@pytest.mark.slow
def test_small_models_on_four_ranks() -> None:
    run(4, [f"{name}-{mesh}" for name in SMALL for mesh in ("4", "2x2")])


@pytest.mark.slow
def test_language_and_vision_models_on_two_ranks() -> None:
    run(2, [f"{name}-2" for name in LARGE])


@pytest.mark.slow
def test_language_and_vision_models_on_a_square() -> None:
    run(4, [f"{name}-2x2" for name in LARGE])
