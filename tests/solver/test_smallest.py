"""The smallest budget that has a plan, exactly and nearly."""

from __future__ import annotations

import pytest
import torch
from test_branches import Normed
from toys import cluster, on_meta, toy

from autopar.solver import smallest


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_the_near_answer_comes_first_in_large_programs_and_is_taken_if_it_is_proven(
    mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = toy(on_meta(Normed, 3), torch.empty(256, 16, device="meta"), on=cluster(*mesh, seed=1))
    exact = smallest.smallest_budget(problem.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_LARGE", 0)
    again = smallest.smallest_budget(problem.problem(), "highs", 1e-4)
    assert exact is not None and again is not None
    assert again.budget_bytes == pytest.approx(exact.budget_bytes, rel=2e-4)


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_the_near_answer_has_a_plan_and_a_bound_below_all(
    mesh: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = toy(on_meta(Normed, 3), torch.empty(256, 16, device="meta"), on=cluster(*mesh, seed=1))
    exact = smallest.smallest_budget(problem.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_PATIENCE", 1e-6)  # too short for the exact answer
    monkeypatch.setattr(smallest, "_NEAR_SECONDS", 60.0)
    near = smallest.smallest_budget(problem.problem(), "highs", 1e-4)
    assert exact is not None and near is not None
    assert near.bound_bytes <= exact.budget_bytes <= near.budget_bytes * (1 + 1e-6)
    assert near.budget_bytes <= 1.5 * exact.budget_bytes
    solution = problem.solve(near.budget_bytes * (1 + 1e-5))
    assert problem.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)
