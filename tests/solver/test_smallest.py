"""The smallest budget that has a plan, exactly and nearly."""

from __future__ import annotations

import pytest
import torch
from test_branches import Normed
from toys import Toy, cluster, on_meta, toy

from autopar.solver import smallest


@pytest.fixture(params=[(2,), (2, 2)], ids=str)
def normed(request: pytest.FixtureRequest) -> Toy:
    return toy(on_meta(Normed, 3), torch.empty(256, 16, device="meta"), on=cluster(*request.param, seed=1))


def test_the_near_answer_comes_first_in_large_programs_and_is_taken_if_it_is_proven(
    normed: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_LARGE", 0)
    again = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert exact is not None and again is not None
    assert again.budget_bytes == pytest.approx(exact.budget_bytes, rel=2e-4)


def test_the_near_answer_has_a_plan_and_a_bound_below_all(normed: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    monkeypatch.setattr(smallest, "_PATIENCE", 1e-6)  # too short for the exact answer
    monkeypatch.setattr(smallest, "_NEAR_SECONDS", 60.0)
    near = smallest.smallest_budget(normed.problem(), "highs", 1e-4)
    assert exact is not None and near is not None
    assert near.bound_bytes <= exact.budget_bytes <= near.budget_bytes * (1 + 1e-6)
    assert near.budget_bytes <= 1.5 * exact.budget_bytes
    solution = normed.solve(near.budget_bytes * (1 + 1e-5))
    assert normed.predict(solution).peak_bytes <= near.budget_bytes * (1 + 1e-5)
