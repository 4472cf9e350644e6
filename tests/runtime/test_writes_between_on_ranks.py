"""A step or another write between forward and backward is an error wherever it is one in one process."""

from __future__ import annotations

from typing import Any

import pytest
from between_cases import SCHEMES, WRITTEN
from launch import launch, values


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("between_cases.py", 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_written_meanwhile_is_refused_as_in_one_process(ranks: list[dict[str, Any]], scheme: str) -> None:
    for found in values(ranks, scheme):
        refused = {case: outcome for case, outcome in found.items() if isinstance(outcome, list)}
        assert all(alone and got for alone, got in refused.values()), refused
        assert {case.partition(",")[0] for case in refused} == {*WRITTEN} - {"a bias"}
        if "fsdp" in scheme:
            assert all("was written in place" in got[1] for _, got in refused.values())
            assert "'scale'" in refused["what is whole, step of lists"][1][1]
        assert max(outcome for outcome in found.values() if not isinstance(outcome, list)) < 1e-12
