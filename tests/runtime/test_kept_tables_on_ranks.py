"""Masks and tables that forward caches cause neither new plans nor warnings, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from launch import launch, values


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("kept_table_cases.py", 2)


@pytest.mark.parametrize("preset", ["ddp", "fsdp", "tp"])
def test_a_model_that_keeps_tables_is_planned_once_for_each_kind_of_call(
    preset: str, ranks: list[dict[str, Any]]
) -> None:
    for worst, traces, told in values(ranks, preset):
        assert worst < 1e-12 and not told
        assert traces == [7, 0]  # six kinds of calls, the first of them twice
