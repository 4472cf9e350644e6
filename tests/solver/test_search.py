"""How long the search waits for a first solution, and which solver the certificate names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pulp
import pytest
from toys import planned, stack

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.linear.clock import Clock
from autopar.solver.linear.engines import engine, engine_of
from autopar.solver.linear.outcome import NONE, Outcome
from autopar.solver.model import Model
from autopar.solver.search import search, under_budget
from autopar.solver.search.smallest import LeastMemory, Smallest
from autopar.solver.seconds import objective


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


def test_the_users_own_warnings_of_pulp_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    migration = pytest.importorskip("pulp.v4_migration")  # since pulp 3.3
    for shown in (True, False):
        monkeypatch.setattr(migration, "V4_MIGRATION_WARNINGS", shown)
        engine("cbc", time_limit=60, gap=0)
        assert migration.V4_MIGRATION_WARNINGS is shown


def test_where_the_search_finds_nothing_in_time_the_plan_of_least_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = stack(2)
    with pytest.raises(InfeasibleError) as refused:
        planned(problem, budget=1)
    least = refused.value.smallest_budget_bytes
    assert least is not None
    whole = objective.run

    def late(model: Any, *given: Any, **named: Any) -> Outcome:
        if model.program.budget is not None:
            raise TimeLimitError("the solver found no plan")
        return whole(model, *given, **named)

    monkeypatch.setattr(under_budget, "run", late)
    plan = planned(problem, budget=least)
    assert plan.predicted.peak_bytes <= least
    assert plan.certificate.status == "feasible"
    assert plan.certificate.bound <= plan.certificate.objective
    with pytest.raises(
        InfeasibleError, match="the smallest budget that the planner finds one for is"
    ):  # infeasibility is proven
        planned(problem, budget=least // 2)
    exact = LeastMemory.smallest

    def unproven(asked: LeastMemory) -> Smallest:
        found = exact(asked)
        assert found is not None
        return replace(found, bound_bytes=0.0)

    monkeypatch.setattr(LeastMemory, "smallest", unproven)
    monkeypatch.setattr(LeastMemory, "is_too_small", lambda *_: False)
    with pytest.raises(TimeLimitError, match=r"within 60 s.*; the plan of least memory that it found needs .*iB"):
        planned(problem, budget=least // 2)
    monkeypatch.setattr(LeastMemory, "smallest", too_late)
    monkeypatch.setattr(LeastMemory, "fitting", lambda *_: None)
    with pytest.raises(TimeLimitError, match=r"found no plan$"):
        planned(problem, budget=least)


def too_late(*_: Any, **__: Any) -> Smallest:
    raise TimeLimitError("not in time")


def test_a_budget_that_is_proven_too_small_is_so_without_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = stack(2)
    monkeypatch.setattr(LeastMemory, "smallest", too_late)
    with pytest.raises(InfeasibleError, match="the smallest budget that has a plan was not found in time") as refused:
        planned(problem, budget=1)
    assert refused.value.smallest_budget_bytes is None
    assert refused.value.budget_lower_bound_bytes == 1


def test_optimal_is_within_the_gap_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's bound is lowered by what tie-breaking may have added, so its gap must be smaller by as much."""
    whole, gap = search.search, 1e-3

    def barely(*given: Any, gap: float, **options: Any) -> Outcome:
        found = whole(*given, gap=gap, **options)
        return replace(found, bound=found.objective * (1 - gap))

    monkeypatch.setattr(objective, "search", barely)
    found = objective.run(Model(stack(2, 2).problem()), "highs", 60.0, gap)
    assert found.objective * (1 - gap) <= found.bound < found.objective
