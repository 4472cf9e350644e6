"""Filling a model whose tied weights have been separated is an error on every rank: see `tied_cases`."""

from __future__ import annotations

import re
from typing import Any

import pytest
from launch import launch, values


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("tied_cases.py", 2)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("built", r"build function ties 'model.embed_tokens.weight', 'lm_head.weight', .*model.tie_weights\(\)"),
        (
            "loaded",
            r"do not hold 'lm_head.weight'.*config ties 'lm_head.weight'.*model.tie_weights\(\) before planning",
        ),
    ],
)
def test_weights_that_were_parted_are_told(case: str, words: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert re.search(words, rank[case]["value"]), rank[case]


def test_weights_that_were_tied_again_are_loaded(two: list[dict[str, Any]]) -> None:
    assert [rank["loaded_tied"]["value"] for rank in two] == [[], []]


def test_parameters_that_share_memory_are_refused(two: list[dict[str, Any]]) -> None:
    for found in values(two, "shared"):
        for how in ("one place", "the other way", "in part"):
            assert "the parameters 'a.weight' and 'b.weight' share memory" in found[how], found
        assert found["columns"] == found["rows"] == "no error"
