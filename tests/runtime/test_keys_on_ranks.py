"""What tells one kind of call from another: enough that none runs the graph of another, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from key_cases import PRESETS
from launch import launch, values


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch("key_cases.py", 2)


@pytest.mark.parametrize("preset", PRESETS)
def test_nested_inputs_have_gradients_of_their_own(preset: str, ranks: list[dict[str, Any]]) -> None:
    for found in values(ranks, f"nested_inputs_with_gradients-{preset}"):
        assert all(value == 2 if "graphs" in name else value < 1e-12 for name, value in found.items()), found
