"""The smallest budget that has a plan, or where that takes too long, one near it and a proof of how near.

Of a small program the peak is minimised. In a large one, conversions of activations make that slow, and decide little:
as if they took no memory, the least peak is found soon, and no plan needs less. From a little above it on budgets are
tried, until one has a plan, and then smaller ones, until one that is hardly smaller has none; a plan that is good in
seconds under a budget is found much sooner than one that is known to be the least.

Nothing but the peak has a price here. The little that elsewhere makes ties go to the plainest plan made the simplex
method stall: it changes costs to come out of ties, and all that little was then to be mended (Llama-3-8B on 2 x 4: more
than 150,000 iterations, not 5,000). Which columns a relaxation begins with is told by seconds.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.clock import cpu_seconds
from autopar.solver.fast import Fast
from autopar.solver.model import Model
from autopar.solver.outcome import Outcome
from autopar.solver.problem import Problem
from autopar.solver.program import Program
from autopar.solver.rows import Rows
from autopar.solver.running import price
from autopar.solver.search import search
from autopar.solver.stage_bytes import UNIT
from autopar.solver.ways import chosen, counts, few

_LARGE = 4_000  # pairs of layouts from which budgets are tried
_CLOSE = 5e-3  # how near it is found where budgets are tried
_FURTHER, _NEAR = 4.0, 1e-2  # the next budget is so many times as far above; the first is so near, which is enough
_ANY = 5e-2  # how far from the fastest the plan of a budget may be: it is there to show that there is one


_MINUTE = 60.0


@dataclass(frozen=True)
class _Seconds:
    """For the least peak of a program, for any solution of it, for a plan under a budget, and for all budgets."""

    least: float = 20.0
    patience: float = 60.0
    each: float = 15.0
    all: float = 45.0

    @classmethod
    def within(cls, time_limit: float) -> _Seconds:
        """These where a plan has a minute or more, and less in proportion."""
        whole, share = cls(), min(time_limit / _MINUTE, 1.0)
        return cls(share * whole.least, share * whole.patience, share * whole.each, share * whole.all)


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


def smallest_budget(
    problem: Problem, solver: str, gap: float, *, time_limit: float = math.inf, too_small: float = 0.0
) -> Smallest | None:
    """The least peak, to `gap` if there is time; None where no plan meets the constraints, whatever the budget.

    `time_limit`: CPU seconds that a plan has; all parts of this together have three times as many, and three minutes.
    `too_small`: bytes that are known to have no plan.

    Raises TimeLimitError where no plan is found in time.
    """
    fast, seconds = Fast(solver, _ANY), _Seconds.within(time_limit)
    if fast.pairs(problem) <= _LARGE:
        model = Model(problem)
        with suppress(TimeLimitError):
            outcome = _least(model, solver, gap, seconds)
            return None if outcome.status == "infeasible" else _as_smallest(model, outcome, outcome.bound)
    known = _of_fastest(problem, fast, seconds)
    try:
        bound, least = soon(problem, solver, gap, time_limit)
    except TimeLimitError:
        if known is None:
            raise
        bound, least = 0.0, None
    if bound == math.inf:
        return None
    if least is not None and (known is None or least.budget_bytes < known.budget_bytes):
        known = least
    return _tried(problem, fast, max(bound, too_small) / UNIT, known, seconds)


def _of_fastest(problem: Problem, fast: Fast, seconds: _Seconds) -> Smallest | None:
    """What the choices of the plan that is fastest without a budget need, at what recomputing them takes least; None
    where that takes too long to find. A plan that costs little memory may be known so where no other is found soon."""
    with suppress(InfeasibleError, TimeLimitError):
        model, outcome = fast.free(problem, seconds.each)
        if len(outcome.values):
            return _with_choices_of(problem, model, outcome, fast.solver, fast.gap, seconds)
    return None


def soon(problem: Problem, solver: str, gap: float, time_limit: float) -> tuple[float, Smallest | None]:
    """Bytes that any plan needs at least, infinite where none meets the constraints; and a plan that needs little
    more, if one is found soon: as if conversions took no memory, with what its choices need in truth.

    Raises TimeLimitError where no plan is found in time.
    """
    bare, seconds = Model(problem, bare=True), _Seconds.within(time_limit)
    least = _least(bare, solver, max(gap, _CLOSE), seconds)
    if least.status == "infeasible":
        return math.inf, None
    return least.bound * UNIT, _with_choices_of(problem, bare, least, solver, gap, seconds)


def _tried(problem: Problem, fast: Fast, bound: float, known: Smallest | None, seconds: _Seconds) -> Smallest:
    """Under budgets above the bound and below that of a plan `known`: further above until one has a plan, then between
    this one and the last that had none, or none in time."""
    end, low, above = cpu_seconds() + seconds.all, bound, _NEAR
    high = math.inf if known is None else known.budget_bytes / UNIT
    while cpu_seconds() < end and high > low * (1 + _NEAR):
        budget = min(low * (1 + above), math.sqrt(low * high))
        above *= _FURTHER
        try:
            model, outcome, is_all = fast.within(problem, budget * UNIT, seconds.each, any_plan=True)
        except TimeLimitError:
            low = budget
            continue
        if outcome.status == "infeasible":
            low, bound = budget, budget if is_all else bound
        else:
            high = float(outcome.values[model.program.budget])
            known = Smallest(model, outcome, high * UNIT, 0.0)
    if known is None:
        raise TimeLimitError("no plan of about the least memory was found in time")
    return replace(known, bound_bytes=min(bound * UNIT, known.budget_bytes))


def _with_choices_of(
    problem: Problem, bare: Model, found: Outcome, solver: str, gap: float, seconds: _Seconds
) -> Smallest | None:
    """What a plan found without all of its memory needs in truth; None where that takes too long to find."""
    model = Model(few(problem, chosen(bare, found, problem)))
    program, peak = model.program, Rows(model, None).peak
    _only_peak_costs(model, peak)
    everything = np.arange(len(program.names))
    outcome = program.integrate(solver, everything, seconds.each, gap, counts(bare, found, model))
    return _as_smallest(model, _whole(program, outcome), 0.0) if len(outcome.values) else None


def _as_smallest(model: Model, outcome: Outcome, bound: float) -> Smallest:
    return Smallest(model, outcome, outcome.objective * UNIT, min(bound, outcome.objective) * UNIT)


def _least(model: Model, solver: str, gap: float, seconds: _Seconds) -> Outcome:
    """The least peak of a model without memory rows yet, in MiB."""
    program, peak = model.program, Rows(model, None).peak
    price(model)
    program.matrix().guide = program.cost
    _only_peak_costs(model, peak)
    return _whole(program, search(program, solver, time_limit=seconds.least, gap=gap, patience=seconds.patience))


def _only_peak_costs(model: Model, peak: int) -> None:
    model.program.cost = np.zeros(len(model.program.names))
    model.program.cost[peak] = 1.0


def _whole(program: Program, outcome: Outcome) -> Outcome:
    """A solver calls 1 what is nearly 1."""
    if not len(outcome.values):
        return outcome
    return replace(outcome, values=np.where(program.matrix().whole, np.round(outcome.values), outcome.values))
