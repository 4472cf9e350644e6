"""The smallest budget that has a plan, or where that takes too long, one near it and a proof of how near.

Of a small program the peak is minimised. In a large one, conversions of activations make that slow, and decide little.
So a plan is first looked for among few ways to run ops, those of fast plans, with all storages of parameters: that
takes a second or two, and other ways seldom take much less memory. What no plan goes below is told by all ways as if
conversions took no memory, or by budgets a little smaller, which have a plan or are proven to have none.

Nothing but the peak has a price here. The little that elsewhere makes ties go to the plainest plan made the simplex
method stall: it changes costs to come out of ties, and all that little was then to be mended (Llama-3-8B on 2 x 4: more
than 150,000 iterations, not 5,000). Which columns a relaxation begins with is told by seconds.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.memory.rows import Rows
from autopar.solver.memory.stage_bytes import UNIT
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search.pruning import Found, Pruner
from autopar.solver.search.search import search
from autopar.solver.search.under_budget import fastest_within
from autopar.solver.search.ways import Kept, chosen, counts, few
from autopar.solver.seconds.objective import price

_LARGE = 4_000  # pairs of layouts up to which a program has all ways; one of few ways has so many
_BARE = 300_000  # up to which all ways are looked at as if conversions took no memory
_CLOSE = 5e-3  # how near the least peak of a large program is found
_FURTHER, _NEAR = 4.0, 1e-2  # the next budget is so many times as far away; the first is so near, which is enough
_ANY = 5e-2  # how far from the fastest the plan of a budget may be: it is there to show that there is one

_MINUTE = 60.0
_FIRST = 10.0  # seconds that a first plan of few ways may take, whatever the limit: it takes one or two


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


class LeastMemory:
    """What is known of the least memory that plans of a problem take: each part is found when it is first asked.

    `time_limit`: CPU seconds that a plan has; all parts of this together have about as many.
    """

    def __init__(self, problem: Problem, pruner: Pruner, time_limit: float = math.inf) -> None:
        self.problem, self.pruner = problem, pruner
        self._seconds = _Seconds.within(time_limit)

    @cached_property
    def _pairs(self) -> int:
        return self.pruner.pairs(self.problem)

    @cached_property
    def _soon(self) -> Smallest | None:
        """The plan of least memory among few ways, which are all of a small program; None where none is found soon."""
        with suppress(InfeasibleError, TimeLimitError):
            if self._pairs <= _LARGE:
                model, gap = Model(self.problem), self.pruner.gap
            else:
                model = Model(few(self.problem, self._few()), tables=self.pruner.tables)
                gap = max(self.pruner.gap, _CLOSE)
            first = replace(self._seconds, patience=max(self._seconds.patience, _FIRST))
            outcome = _least(model, self.pruner.solver, gap, first)
            if len(outcome.values):
                return _as_smallest(model, outcome, outcome.bound if self._pairs <= _LARGE else 0.0)
        return None

    def _few(self) -> Kept:
        """Fast ways, and all storages of parameters."""
        pruner, problem = self.pruner, self.problem
        return pruner.ways(problem).up_to(pruner.least(problem), pruner.best_and_stored(problem), _LARGE, math.inf)[0]

    @cached_property
    def _bare(self) -> tuple[float, Smallest | None]:
        """Bytes that any plan needs at least, infinite where none meets the constraints; and a plan that needs little
        more, if one is found: as if conversions took no memory, with what its choices need in truth."""
        if self._pairs > _BARE and self._soon is not None:  # it would take minutes
            return 0.0, None
        bare, solver, gap = Model(self.problem, bare=True), self.pruner.solver, max(self.pruner.gap, _CLOSE)
        try:
            least = _least(bare, solver, gap, self._seconds, is_known=self._soon is not None)
        except TimeLimitError:
            return 0.0, None
        if least.status == "infeasible":
            return math.inf, None
        return least.bound * UNIT, _with_choices_of(self.problem, (bare, least), solver, gap, self._seconds)

    @property
    def is_known(self) -> bool:
        """Whether some plan is known, found soon."""
        return self._soon is not None

    def fitting(self, budget_bytes: float) -> Found | None:
        """A plan found soon that fits."""
        if self._soon is not None and self._soon.budget_bytes <= budget_bytes:
            return self._soon.model, self._soon.outcome
        return None

    def is_too_small(self, budget_bytes: float) -> bool:
        """Whether no plan at all is known to fit."""
        return (self._soon is not None and self._soon.bound_bytes > budget_bytes) or self._bare[0] > budget_bytes

    def smallest(self, too_small: float = 0.0) -> Smallest | None:
        """The least peak, to the gap if there is time; None where no plan meets the constraints, whatever the budget.

        `too_small`: bytes that are known to have no plan.

        Raises TimeLimitError where no plan is found in time.
        """
        known = self._soon
        if known is not None and self._pairs <= _LARGE:
            return replace(known, bound_bytes=min(max(known.bound_bytes, too_small), known.budget_bytes))
        bound, other = self._bare
        if bound == math.inf:
            return None
        if other is not None and (known is None or other.budget_bytes < known.budget_bytes):
            known = other
        if known is None:
            known = self._of_fastest()
        end, pruner = cpu_seconds() + self._seconds.all, replace(self.pruner, gap=_ANY)
        trials = _Trials(self.problem, pruner, max(bound, too_small) / UNIT, self._seconds.each, end)
        known = trials.downwards(known or trials.upwards())
        return replace(known, bound_bytes=min(trials.bound * UNIT, known.budget_bytes))

    def _of_fastest(self) -> Smallest | None:
        """What the choices of the plan that is fastest without a budget need, at what recomputing them takes least."""
        with suppress(InfeasibleError, TimeLimitError):
            pruner = replace(self.pruner, gap=_ANY)
            found = pruner.free(self.problem, self._seconds.each)
            if len(found[1].values):
                return _with_choices_of(self.problem, found, pruner.solver, pruner.gap, self._seconds)
        return None


@dataclass
class _Trials:
    """Budgets that are tried one after the other, until `end`: each has a plan, or is proven to have none, or neither
    in time. `bound`: MiB, as all here, that no plan goes below."""

    problem: Problem
    pruner: Pruner
    bound: float
    seconds: float
    end: float

    def upwards(self) -> Smallest:
        """Further and further above the bound, the first budget that has a plan."""
        low, away = self.bound, _NEAR
        while low > 0 and cpu_seconds() < self.end:
            low *= 1 + away
            away *= _FURTHER
            if (found := self._at(low)) is not None:
                return found
        raise TimeLimitError("no plan of about the least memory was found in time")

    def downwards(self, known: Smallest) -> Smallest:
        """Further and further below what a plan needs while that is found too much, then between the last budget that
        had a plan and the last that had none, or none in time."""
        low, away = self.bound, _NEAR
        while cpu_seconds() < self.end and (high := known.budget_bytes / UNIT) > low * (1 + _NEAR):
            budget = max(high / (1 + away), math.sqrt(low * high))
            away *= _FURTHER
            if (found := self._at(budget)) is not None:
                known = found
            else:
                low = budget
        return self._from_afar(low, known)

    def _from_afar(self, late: float, known: Smallest) -> Smallest:
        """Where a budget was told too late: others further and further below, until one is proven to have no plan,
        then between the two."""
        away, given = _NEAR, self.bound
        while cpu_seconds() < self.end and late > self.bound * (1 + _NEAR):
            before = self.bound
            budget = math.sqrt(before * late) if before > given else late / (1 + away)
            away *= _FURTHER
            if budget <= before:
                break
            if (found := self._at(budget)) is not None:
                return found
            late = budget if self.bound == before else late
        return known

    def _at(self, budget: float) -> Smallest | None:
        """A plan under a budget; None where there is none, which raises the bound, or none in time."""
        with suppress(TimeLimitError):
            model, outcome, is_all = fastest_within(
                self.pruner, self.problem, budget * UNIT, self.seconds, any_plan=True
            )
            if outcome.status != "infeasible":
                return Smallest(model, outcome, float(outcome.values[model.program.budget]) * UNIT, 0.0)
            if is_all:
                self.bound = budget
        return None


def _with_choices_of(problem: Problem, found: Found, solver: str, gap: float, seconds: _Seconds) -> Smallest | None:
    """What a plan found without all of its memory needs in truth; None where that takes too long to find."""
    model = Model(few(problem, chosen(*found, problem)))
    program, peak = model.program, Rows(model, None).peak
    _only_peak_costs(model, peak)
    everything = np.arange(len(program.names))
    outcome = program.integrate(solver, everything, seconds.each, gap, counts(*found, model))
    return _as_smallest(model, _whole(program, outcome), 0.0) if len(outcome.values) else None


def _as_smallest(model: Model, outcome: Outcome, bound: float) -> Smallest:
    return Smallest(model, outcome, outcome.objective * UNIT, min(bound, outcome.objective) * UNIT)


def _least(model: Model, solver: str, gap: float, seconds: _Seconds, is_known: bool = False) -> Outcome:
    """The least peak of a model without memory rows yet, in MiB. `is_known`: that of another is, so that time is
    short."""
    program, peak = model.program, Rows(model, None).peak
    price(model)
    program.matrix().guide = program.cost
    _only_peak_costs(model, peak)
    patience = seconds.least if is_known else seconds.patience
    return _whole(program, search(program, solver, time_limit=seconds.least, gap=gap, patience=patience))


def _only_peak_costs(model: Model, peak: int) -> None:
    model.program.cost = np.zeros(len(model.program.names))
    model.program.cost[peak] = 1.0


def _whole(program: Program, outcome: Outcome) -> Outcome:
    """A solver calls 1 what is nearly 1."""
    if not len(outcome.values):
        return outcome
    return replace(outcome, values=np.where(program.matrix().whole, np.round(outcome.values), outcome.values))
