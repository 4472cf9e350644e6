"""Which calls share a graph: no call runs the graph of a different kind, and no more graphs exist than needed."""

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


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("case", "graphs"), [("strides", 3), ("one_tensor_twice", 2), ("signs", 2), ("not_asked_for", 1)]
)
def test_what_forward_asks_for_tells_calls_apart(
    case: str, graphs: int, preset: str, ranks: list[dict[str, Any]]
) -> None:
    for found in values(ranks, f"{case}-{preset}"):
        assert all(one["error"] < 1e-12 and one["graphs"] == graphs for one in found), found


def test_calls_of_different_tensors_run_the_graph_of_one_tensor_given_twice(ranks: list[dict[str, Any]]) -> None:
    assert values(ranks, "planned_in_another_mode") == [[2, 2, 2]] * 2
