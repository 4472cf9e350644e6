"""Tensors that forward sets on modules exist after calls of a planned model, with gradients, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values
from loop_cases import PRESETS


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("set_cases.py", 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loop_adds_what_the_modules_have(preset: str, ranks: list[dict[str, Any]]) -> None:
    for worst, graphs in values(ranks, f"trained-{preset}"):
        assert (worst < 1e-12, graphs) == (True, 1), worst


@pytest.mark.parametrize("preset", PRESETS)
def test_calls_of_other_kinds_set_theirs(preset: str, ranks: list[dict[str, Any]]) -> None:
    assert all(value < 1e-12 for value in values(ranks, f"in_eval-{preset}"))


def test_each_rank_has_rows_of_its_own(ranks: list[dict[str, Any]]) -> None:
    assert all(value < 1e-12 for value in values(ranks, "own_rows"))
