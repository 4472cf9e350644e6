"""How long the search waits for a first solution, and who is said to have made it."""

from __future__ import annotations

import math
from typing import Any

import pulp
import pytest

from autopar.solver import search
from autopar.solver.clock import Clock
from autopar.solver.engines import engine_of
from autopar.solver.outcome import NONE, Outcome


def test_a_first_solution_may_take_all_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[float] = []

    def rooted(part: Any, basis: Any, solver: str, left: float, clock: Clock) -> Outcome:
        allowed.append(left)
        return Outcome("infeasible", NONE, math.inf, math.inf)

    monkeypatch.setattr(search, "_rooted", rooted)
    found = search._of_part(Any, None, None, "highs", 1e-3, Clock(5.0, 500.0), math.inf)  # type: ignore[arg-type]
    assert found.status == "infeasible"
    assert 490 < allowed[0] <= 500


def test_where_highs_cannot_be_had_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of("highs") == "highs"
    assert engine_of("cbc") == "cbc"
    monkeypatch.setattr(pulp.HiGHS, "available", lambda solver: False)
    assert engine_of("highs") == "cbc"
