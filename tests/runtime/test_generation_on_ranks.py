"""`generate` on a planned model gives the tokens of one process, and plans no call twice: see `generation_cases`."""

from __future__ import annotations

from typing import Any

import pytest
from generation_cases import NEW_TOKENS
from launch import launch

_GROWING = ("dynamic", "llama", "adapters", "wrapped", "llama_beams")
GRAPHS = {"static": 1 + 2, "t5": 2 + NEW_TOKENS, **dict.fromkeys(_GROWING, 1 + NEW_TOKENS)}
"""The one of training; one for each length of the cache, or one for the prompt and one for a token; an encoder's."""


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch("generation_cases.py", 2)


@pytest.mark.parametrize("case", GRAPHS)
def test_tokens_are_those_of_one_process(case: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert "error" not in rank[case], rank[case]["traceback"]
        found = rank[case]["value"]
        assert found["tokens"] == [found["alone"]] * 2
        assert found["graphs"] == [GRAPHS[case]] * 2


def test_prompts_must_be_the_same_on_every_rank(two: list[dict[str, Any]]) -> None:
    assert all("same prompts on every rank" in rank["local"]["value"] for rank in two)
