"""Many small architectures on four real ranks: loss and gradients of one process under three kinds of plans.

One launch runs all selected cases (`-k "llama or t5"`); `-rA` shows the errors that were measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from launch import launch, selected

sys.path.insert(0, str(Path(__file__).parent))
from architecture_plans import EXACT, kinds_of
from small_architectures import MODELS


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return launch("architecture_cases.py", 4, cases=selected(request, "name"), timeout_seconds=5400)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", MODELS)
def test_architecture_on_four_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "error" not in rank[name], rank[name]["traceback"]
        found = rank[name]["value"]
        assert list(found) == list(kinds_of(name))
        for kind in kinds_of(name):
            assert found[kind]["error"] < EXACT, kind
        assert found["unconstrained"]["splits"] and found["forced"]["splits"]
    print(name, {kind: ranks[0][name]["value"][kind]["error"] for kind in kinds_of(name)})
