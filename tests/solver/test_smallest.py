"""The smallest budget that has a plan, computed exactly or approximately."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_branches import Normed
from toys import Toy, cluster, least_memory, on_meta, toy

from autopar import Cluster, InfeasibleError, plan
from autopar.errors import TimeLimitError
from autopar.solver.linear.outcome import Outcome
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search import smallest, under_budget
from autopar.solver.search.pruning import Pruner
from autopar.solver.search.smallest import LeastMemory
from autopar.solver.seconds.objective import run
from autopar.solver.solution import read_solution


@pytest.fixture(params=[(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def normed(request: pytest.FixtureRequest) -> Toy:
    return toy(on_meta(Normed, 3), torch.empty(256, 16, device="meta"), on=cluster(*request.param, seed=1))


def test_budgets_that_are_tried_come_near_the_least_peak(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = least_memory(normed.problem())
    monkeypatch.setattr(smallest, "_LARGE", 0)
    near = least_memory(normed.problem())
    assert near.bound_bytes <= exact.budget_bytes * (1 + 1e-4) <= near.budget_bytes * (1 + 2e-4)
    assert near.budget_bytes <= 1.02 * exact.budget_bytes
    solution = normed.solve(near.budget_bytes * (1 + 1e-5))
    assert normed.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)


def test_without_time_to_try_budgets_the_answer_has_a_plan_and_a_bound(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = least_memory(normed.problem())
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest._Seconds, "within", lambda _: smallest._Seconds(all=0.0))
    near = least_memory(normed.problem())
    assert near.bound_bytes <= exact.budget_bytes * (1 + 1e-4) <= near.budget_bytes * (1 + 2e-4)
    assert near.budget_bytes <= 1.5 * exact.budget_bytes
    solution = normed.solve(near.budget_bytes * (1 + 1e-5))
    assert normed.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)


def test_what_is_known_to_be_too_small_is_a_bound(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = least_memory(normed.problem())
    monkeypatch.setattr(smallest, "_LARGE", 0)
    less = 0.999 * exact.bound_bytes
    near = least_memory(normed.problem(), too_small=less)
    assert near.bound_bytes >= less


def test_seconds_are_those_of_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    within = smallest._Seconds.within
    assert within(math.inf) == within(600) == smallest._Seconds() and within(15) == smallest._Seconds(
        5, 15, 3.75, 11.25
    )
    asked: list[float] = []
    monkeypatch.setattr(smallest._Seconds, "within", lambda limit: asked.append(limit) or within(limit))
    model, x = on_meta(Normed, 3), torch.empty(256, 16, device="meta")
    with pytest.raises(InfeasibleError):
        plan(model, {"x": x}, Cluster.preset("cpu", (2,)), memory_budget="1KiB", time_limit=7)
    assert asked == [7]


def too_late(*_: Any, **__: Any) -> Any:
    raise TimeLimitError("late")


def test_no_plan_in_time_is_an_error(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest, "_least", too_late)
    monkeypatch.setattr(smallest, "_with_choices_of", lambda *_: None)
    with pytest.raises(TimeLimitError, match="no plan of about the least memory"):
        least_memory(normed.problem())


def test_the_fastest_plan_tells_of_a_budget_where_no_other_is_found_in_time(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly a refusal named no budget that has a plan, or a larger one than the fastest plan's peak."""
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest._Seconds, "within", lambda _: smallest._Seconds(all=0.0))
    monkeypatch.setattr(smallest, "_least", too_late)
    near = least_memory(normed.problem())
    assert near.bound_bytes == 0.0
    assert near.budget_bytes <= normed.predict(normed.solve(1 << 40)).peak_bytes
    assert normed.predict(normed.solve(near.enough_bytes)).peak_bytes <= near.enough_bytes


def test_budgets_go_up_from_what_is_known_to_be_too_small_until_one_has_a_plan(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = least_memory(normed.problem())
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest, "_least", too_late)
    monkeypatch.setattr(smallest.LeastMemory, "_of_fastest", lambda _: None)
    near = least_memory(normed.problem(), too_small=0.3 * exact.bound_bytes)
    assert near.bound_bytes <= exact.budget_bytes * (1 + 1e-4) <= near.budget_bytes * (1 + 2e-4)
    assert near.budget_bytes <= 1.02 * exact.budget_bytes


def test_what_is_told_too_late_is_told_of_smaller_budgets(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the least peak no proof is found in time, so the lower bound comes from a smaller budget."""
    exact = least_memory(normed.problem())
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest.LeastMemory, "_bare", (0.0, None))
    whole, asked = smallest.fastest_within, list[float]()

    def slow_when_near(pruner: Pruner, problem: Problem, budget: float, seconds: float, **options: Any) -> Any:
        asked.append(budget)
        if 0.9 * exact.budget_bytes < budget < exact.budget_bytes:
            raise TimeLimitError("late")
        return whole(pruner, problem, budget, seconds, **options)

    monkeypatch.setattr(smallest, "fastest_within", slow_when_near)
    near = least_memory(normed.problem())
    assert exact.budget_bytes * (1 - 1e-4) <= near.budget_bytes <= 1.02 * exact.budget_bytes
    assert 0.7 * exact.budget_bytes < near.bound_bytes <= 0.9 * exact.budget_bytes
    assert len(asked) < 16


def test_a_budget_that_few_plans_fit_has_one_within_its_limit(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly the search took four times its time limit, and then started another search."""
    problem = normed.problem()
    exact, seen = least_memory(problem), list[float]()

    def late(model: Model, solver: str, seconds: float, gap: float, **options: Any) -> Outcome:
        seen.append(options["patience"])
        if options["best"] is None:
            raise TimeLimitError("the solver found no plan")
        return run(model, solver, seconds, gap, **options)

    monkeypatch.setattr(under_budget, "run", late)
    for budget in (exact.enough_bytes, 0.999 * exact.bound_bytes):
        pruner = Pruner("highs", 1e-3)
        least = LeastMemory(problem, pruner, 30.0)
        model, found, is_all = under_budget.fastest_within(pruner, problem, budget, 30.0, small=least)
        assert is_all
        if budget < exact.bound_bytes:
            assert found.status == "infeasible"
        else:
            assert normed.predict(read_solution(model, found)).peak_bytes <= budget
    assert seen[0] == pytest.approx(10.0, abs=0.5)
