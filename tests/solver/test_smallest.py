"""The smallest budget that has a plan, exactly and nearly."""

from __future__ import annotations

import math

import pytest
import torch
from test_branches import Normed
from toys import Toy, cluster, on_meta, toy

from autopar import Cluster, InfeasibleError, plan
from autopar.errors import TimeLimitError
from autopar.solver import smallest


@pytest.fixture(params=[(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def normed(request: pytest.FixtureRequest) -> Toy:
    return toy(on_meta(Normed, 3), torch.empty(256, 16, device="meta"), on=cluster(*request.param, seed=1))


def test_budgets_that_are_tried_come_near_the_least_peak(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_LARGE", 0)
    near = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert exact is not None and near is not None
    assert near.bound_bytes <= exact.budget_bytes * (1 + 1e-4) <= near.budget_bytes * (1 + 2e-4)
    assert near.budget_bytes <= 1.02 * exact.budget_bytes
    solution = normed.solve(near.budget_bytes * (1 + 1e-5))
    assert normed.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)


def test_without_time_to_try_budgets_the_answer_has_a_plan_and_a_bound(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest._Seconds, "within", lambda _: smallest._Seconds(all=0.0))
    near = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert exact is not None and near is not None
    assert near.bound_bytes <= exact.budget_bytes * (1 + 1e-4) <= near.budget_bytes * (1 + 2e-4)
    assert near.budget_bytes <= 1.5 * exact.budget_bytes
    solution = normed.solve(near.budget_bytes * (1 + 1e-5))
    assert normed.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)


def test_what_is_known_to_be_too_small_is_a_bound(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert exact is not None
    monkeypatch.setattr(smallest, "_LARGE", 0)
    less = 0.999 * exact.bound_bytes
    near = smallest.smallest_budget(normed.problem(), "highs", 1e-4, too_small=less)
    assert near is not None and near.bound_bytes >= less


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


def test_no_plan_in_time_is_an_error(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest._Seconds, "within", lambda _: smallest._Seconds(all=0.0))
    monkeypatch.setattr(smallest, "_with_choices_of", lambda *_: None)
    with pytest.raises(TimeLimitError, match="no plan of about the least memory"):
        smallest.smallest_budget(normed.problem(), "highs", 1e-4)


def test_the_fastest_plan_tells_of_a_budget_where_no_other_is_found_in_time(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal knew of no budget that has a plan, or of one that was larger than what the fastest plan takes."""
    late = TimeLimitError("late")
    monkeypatch.setattr(smallest, "_LARGE", 0)
    monkeypatch.setattr(smallest._Seconds, "within", lambda _: smallest._Seconds(all=0.0))
    monkeypatch.setattr(smallest, "soon", lambda *_: (_ for _ in ()).throw(late))
    near = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert near is not None and near.bound_bytes == 0.0
    assert near.budget_bytes <= normed.predict(normed.solve(1 << 40)).peak_bytes
    assert normed.predict(normed.solve(near.enough_bytes)).peak_bytes <= near.enough_bytes
