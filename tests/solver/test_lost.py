"""If HiGHS ends a relaxation without a result ("Unknown"), this is accepted only after retries with other options."""

from __future__ import annotations

import pytest
import torch
from test_relaxation import program
from torch import nn

from autopar import Cluster, InfeasibleError, Plan, plan
from autopar.solver.linear.highs import HighsSession


@pytest.mark.parametrize("many", [1, 2, 3])
@pytest.mark.parametrize("word", ["Unknown", "Not Set"])
def test_a_relaxation_that_highs_has_no_word_for_is_tried_again(
    many: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = program(0.3, 2)
    expected = asked.relax("highs", 60.0, {})
    solve, ways = HighsSession._solve, []

    def lost_at_first(self: HighsSession, iterations: int) -> str:
        """Report the status that HiGHS itself once returned, for the first `many` runs."""
        options = ("dual_simplex_cost_perturbation_multiplier", "random_seed")
        ways.append(tuple(self._engine.getOptionValue(option)[1] for option in options))
        return solve(self, iterations) if len(ways) > many else word

    monkeypatch.setattr(HighsSession, "_solve", lost_at_first)
    found = asked.relax("highs", 60.0, {})
    assert found.status == "optimal"
    assert found.objective == pytest.approx(expected.objective, rel=1e-6)
    assert len(set(ways[: many + 1])) == many + 1  # every retry has other options


def test_highs_that_is_lost_each_time_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = program(0.3, 2)
    monkeypatch.setattr(HighsSession, "_solve", lambda self, iterations: "Unknown")
    assert asked.relax("highs", 60.0, {}).status == "stopped"


def test_the_smallest_budget_of_an_mlp_has_a_plan_with_a_proof() -> None:
    """HiGHS 1.15 returned such a status at exactly this budget, but not at budgets a few bytes away."""
    with torch.device("meta"):
        hidden = [part for _ in range(4) for part in (nn.Linear(256, 256), nn.ReLU())]
        model, inputs = nn.Sequential(*hidden, nn.Linear(256, 16)), {"input": torch.empty(64, 256)}
    on = Cluster.preset("cpu", (2, 4), ("dp", "tp"))

    def within(budget: int) -> Plan:
        options = {"optimizer": "adafactor", "precision": "fp32", "loss_fn": torch.mean}
        return plan(model, inputs, on, memory_budget=budget, **options)

    with pytest.raises(InfeasibleError) as error:
        within(1)
    smallest = error.value.smallest_budget_bytes
    assert smallest is not None
    for budget in {smallest, 377_888}:
        assert within(budget).certificate.status == "optimal"
