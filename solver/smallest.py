"""The smallest budget that has a plan, or where that takes too long, one near it and a proof of how near."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from autopar.errors import TimeLimitError
from autopar.solver.linear import Linear
from autopar.solver.model import Model
from autopar.solver.outcome import Outcome
from autopar.solver.problem import Problem
from autopar.solver.rows import Rows
from autopar.solver.running import run
from autopar.solver.stage_bytes import UNIT

_PATIENCE = 20.0  # seconds for the exact answer
_NEAR_SECONDS = 20.0  # for each step of the near one
_LARGE, _QUICK_SECONDS = 20_000, 5.0  # variables from which the near one comes first, as it is often exact


@dataclass(frozen=True)
class Smallest:
    """A plan (`model` and its `outcome`) whose rows need `budget_bytes`; no plan needs less than `bound_bytes`."""

    model: Model
    outcome: Outcome
    budget_bytes: float
    bound_bytes: float

    @property
    def enough_bytes(self) -> int:
        """A budget that has this plan for certain, a little more than it needs."""
        return math.ceil(self.budget_bytes * (1 + 1e-5)) + 64


def smallest_budget(problem: Problem, solver: str, gap: float) -> Smallest | None:
    """Minimise the peak; None where no plan meets the constraints, whatever the budget."""
    model, near = _peak_model(problem), None
    if len(model.program.names) > _LARGE:
        with suppress(TimeLimitError):
            near = _near(problem, solver, gap, _QUICK_SECONDS)
            if near is None or near.budget_bytes <= near.bound_bytes * (1 + gap):
                return near
    try:
        outcome = run(model, solver, _PATIENCE, gap, patience=_PATIENCE)
    except TimeLimitError:
        return near or _near(problem, solver, gap, _NEAR_SECONDS)
    if outcome.status == "infeasible":
        return None
    return Smallest(model, outcome, outcome.objective * UNIT, outcome.bound * UNIT)


def _peak_model(problem: Problem, *, bare: bool = False) -> Model:
    model = Model(problem, bare=bare)
    rows = Rows(model, None)
    model.seconds = Linear({rows.peak: 1.0})
    return model


def _near(problem: Problem, solver: str, gap: float, seconds: float) -> Smallest | None:
    """Minimised as if converting activations took no memory; then what the plan found so needs in truth."""
    bare = _peak_model(problem, bare=True)
    found = run(bare, solver, seconds, gap)
    if found.status == "infeasible":
        return None
    model = _peak_model(problem)
    program = model.program
    for mine, its in zip(model.x, bare.x, strict=True):
        chosen = max(range(len(its)), key=lambda i: found.values[its[i]])
        for i, variable in enumerate(mine):
            program.lower[variable] = program.upper[variable] = float(i == chosen)
    for stage, counts in model.recomputed.items():
        for count, whether, same in zip(counts, model.any_recomputed[stage], bare.recomputed[stage], strict=True):
            many = float(round(found.values[same]))
            program.lower[count] = program.upper[count] = many
            program.lower[whether] = program.upper[whether] = min(many, 1.0)
    outcome = run(model, solver, seconds, gap)
    return Smallest(model, outcome, outcome.objective * UNIT, found.bound * UNIT)
