"""The smallest budget that has a plan, or if that takes too long, a budget near it and a proof of how near.

In a small program, the peak is minimised. In a large one, conversions of activations make that slow, although they
change the peak little. So a plan is first looked for among few choices: those of fast plans, with all choices of how
parameters are stored. That takes a second or two, and other choices seldom need much less memory. A lower bound on
the memory of all plans comes from a model with all choices in which conversions take no memory, or from trials of
slightly smaller budgets, each of which has a plan or is proven to have none.

Only the peak has a cost in these programs. Elsewhere, small costs break ties in favour of the plainest plan. Here they
made the simplex method stall: it perturbs costs to leave ties, and removing the perturbation of all the small costs
took most iterations (Llama-3-8B on 2 x 4: more than 150,000 instead of 5,000). The first columns of a relaxation are
chosen by their cost in seconds.
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
from autopar.solver.search.choice_subsets import ChoiceSubset, chosen, fixed_counts, restricted_to
from autopar.solver.search.pruning import Pruner, SolvedModel
from autopar.solver.search.search import search
from autopar.solver.search.under_budget import fastest_within
from autopar.solver.seconds.objective import price

# Pairs of layouts (one flow variable each):
_MAX_FLOWS = 4_000  # up to this size a program has all choices; a larger problem is restricted to this size
_MAX_FLOWS_BARE = 300_000  # of the model without memory of conversions; with more it would take minutes

# Relative to a peak or a cost:
_LEAST_PEAK_GAP = 5e-3  # gap to which the least peak of a large program is found: it is a figure of an error message
# The first trial budget is a step away, each next one so many times as far; a step to the bound is enough:
_BUDGET_STEP, _BUDGET_STEP_GROWTH = 1e-2, 4.0
_TRIAL_PLAN_GAP = 5e-2  # gap of the plans of trial budgets: they only have to show that there is a plan

_FULL_TIME_LIMIT = 60.0  # a time limit below this shortens all searches here in proportion
_MIN_FIRST_PATIENCE = 10.0  # seconds for a first plan of few choices, whatever the limit: it mostly takes one or two


@dataclass(frozen=True)
class _Seconds:
    """CPU seconds to minimise the peak of a program (`least`), to find any solution of it (`patience`), for the plan
    `per_search` of a trial budget, and for `all` trial budgets together."""

    least: float = 20.0
    patience: float = 60.0
    per_search: float = 15.0
    all: float = 45.0

    @classmethod
    def within(cls, time_limit: float) -> _Seconds:
        """The defaults if the time limit is a minute or more, else in proportion less."""
        whole, share = cls(), min(time_limit / _FULL_TIME_LIMIT, 1.0)
        return cls(share * whole.least, share * whole.patience, share * whole.per_search, share * whole.all)


@dataclass(frozen=True)
class Smallest:
    """A plan (`model` and its `outcome`) that needs `budget_bytes` by its memory rows; no plan needs less than
    `bound_bytes`."""

    model: Model
    outcome: Outcome
    budget_bytes: float
    bound_bytes: float

    @property
    def enough_bytes(self) -> int:
        """A budget in which this plan fits for certain: a little more than it needs."""
        return math.ceil(self.budget_bytes * (1 + 1e-5)) + 64


class LeastMemory:
    """The least memory that plans of a problem need. Each result is computed when first asked for.

    `time_limit`: CPU seconds that the search for a plan has; all results here together take about as many.
    """

    def __init__(self, problem: Problem, pruner: Pruner, time_limit: float = math.inf) -> None:
        self.problem, self.pruner = problem, pruner
        self._seconds = _Seconds.within(time_limit)

    @cached_property
    def _flows(self) -> int:
        return self.pruner.count_flows(self.problem)

    @cached_property
    def _soon(self) -> Smallest | None:
        """The plan of least memory among few choices (in a small program, among all); None if none is found soon."""
        with suppress(InfeasibleError, TimeLimitError):
            if self._flows <= _MAX_FLOWS:
                model, gap = Model(self.problem), self.pruner.gap
            else:
                model = Model(restricted_to(self.problem, self._restricted_choices()), tables=self.pruner.tables)
                gap = max(self.pruner.gap, _LEAST_PEAK_GAP)
            first = replace(self._seconds, patience=max(self._seconds.patience, _MIN_FIRST_PATIENCE))
            outcome = _least(model, self.pruner.solver, gap, first)
            if len(outcome.values):
                return _as_smallest(model, outcome, outcome.bound if self._flows <= _MAX_FLOWS else 0.0)
        return None

    def _restricted_choices(self) -> ChoiceSubset:
        """The choices of fast plans, and all choices of parameters."""
        pruner, problem = self.pruner, self.problem
        bounds, required = pruner.choice_bounds(problem), pruner.best_and_stored(problem)
        return pruner.choices(problem).up_to(bounds, required, _MAX_FLOWS, math.inf)[0]

    @cached_property
    def _bare(self) -> tuple[float, Smallest | None]:
        """From the model in which conversions take no memory: a lower bound in bytes on all plans (infinite if no plan
        meets the constraints), and the plan of its choices, if found, with the memory that it really needs."""
        if self._flows > _MAX_FLOWS_BARE and self._soon is not None:  # it would take minutes
            return 0.0, None
        bare, solver, gap = Model(self.problem, bare=True), self.pruner.solver, max(self.pruner.gap, _LEAST_PEAK_GAP)
        try:
            least = _least(bare, solver, gap, self._seconds, is_known=self._soon is not None)
        except TimeLimitError:
            return 0.0, None
        if least.status == "infeasible":
            return math.inf, None
        return least.bound * UNIT, _with_choices_of(self.problem, (bare, least), solver, gap, self._seconds)

    @property
    def is_known(self) -> bool:
        """Whether some plan was found soon."""
        return self._soon is not None

    def fitting(self, budget_bytes: float) -> SolvedModel | None:
        """The plan that was found soon, if it fits the budget."""
        if self._soon is not None and self._soon.budget_bytes <= budget_bytes:
            return self._soon.model, self._soon.outcome
        return None

    def is_too_small(self, budget_bytes: float) -> bool:
        """Whether it is proven that no plan fits the budget."""
        return (self._soon is not None and self._soon.bound_bytes > budget_bytes) or self._bare[0] > budget_bytes

    def smallest(self, too_small: float = 0.0) -> Smallest | None:
        """The plan of least peak, to the gap if there is time; None if no plan meets the constraints with any budget.

        `too_small`: a budget in bytes that is known to have no plan.

        Raises TimeLimitError if no plan is found in time.
        """
        plan = self._soon
        if plan is not None and self._flows <= _MAX_FLOWS:
            return replace(plan, bound_bytes=min(max(plan.bound_bytes, too_small), plan.budget_bytes))
        bound, other = self._bare
        if bound == math.inf:
            return None
        if other is not None and (plan is None or other.budget_bytes < plan.budget_bytes):
            plan = other
        if plan is None:
            plan = self._of_fastest()
        end, pruner = cpu_seconds() + self._seconds.all, replace(self.pruner, gap=_TRIAL_PLAN_GAP)
        trials = _Trials(self.problem, pruner, max(bound, too_small) / UNIT, self._seconds.per_search, end)
        plan = trials.downwards(plan or trials.upwards())
        return replace(plan, bound_bytes=min(trials.bound * UNIT, plan.budget_bytes))

    def _of_fastest(self) -> Smallest | None:
        """The plan that is fastest without a budget, with the memory that it needs."""
        with suppress(InfeasibleError, TimeLimitError):
            pruner = replace(self.pruner, gap=_TRIAL_PLAN_GAP)
            fastest = pruner.free(self.problem, self._seconds.per_search)
            if len(fastest[1].values):
                return _with_choices_of(self.problem, fastest, pruner.solver, pruner.gap, self._seconds)
        return None


@dataclass
class _Trials:
    """Budgets that are tried one after the other, until `end`: each trial finds a plan, proves that there is none, or
    runs out of time. `bound`: a lower bound on the memory of all plans. All figures here are in MiB."""

    problem: Problem
    pruner: Pruner
    bound: float
    seconds: float
    end: float

    def upwards(self) -> Smallest:
        """Try budgets ever further above the bound; the plan of the first budget that has one."""
        low, away = self.bound, _BUDGET_STEP
        while low > 0 and cpu_seconds() < self.end:
            low *= 1 + away
            away *= _BUDGET_STEP_GROWTH
            if (plan := self._at(low)) is not None:
                return plan
        raise TimeLimitError("no plan of about the least memory was found in time")

    def downwards(self, plan: Smallest) -> Smallest:
        """Try budgets ever further below what the known plan needs while these have plans, then bisect between the last
        budget with a plan and the last without one (or without one in time)."""
        low, away = self.bound, _BUDGET_STEP
        while cpu_seconds() < self.end and (high := plan.budget_bytes / UNIT) > low * (1 + _BUDGET_STEP):
            budget = max(high / (1 + away), math.sqrt(low * high))
            away *= _BUDGET_STEP_GROWTH
            if (smaller := self._at(budget)) is not None:
                plan = smaller
            else:
                low = budget
        return self._from_afar(low, plan)

    def _from_afar(self, late: float, plan: Smallest) -> Smallest:
        """After a trial at the budget `late` ran out of time: try budgets ever further below it, until one is proven to
        have no plan, then bisect between the two to raise the bound."""
        away, first_bound = _BUDGET_STEP, self.bound
        while cpu_seconds() < self.end and late > self.bound * (1 + _BUDGET_STEP):
            before = self.bound
            budget = math.sqrt(before * late) if before > first_bound else late / (1 + away)
            away *= _BUDGET_STEP_GROWTH
            if budget <= before:
                break
            if (smaller := self._at(budget)) is not None:
                return smaller
            late = budget if self.bound == before else late
        return plan

    def _at(self, budget: float) -> Smallest | None:
        """A plan under a budget; None if there is none (then the bound is raised) or none was found in time."""
        with suppress(TimeLimitError):
            model, outcome, is_all = fastest_within(
                self.pruner, self.problem, budget * UNIT, self.seconds, any_plan=True
            )
            if outcome.status != "infeasible":
                return Smallest(model, outcome, float(outcome.values[model.program.budget]) * UNIT, 0.0)
            if is_all:
                self.bound = budget
        return None


def _with_choices_of(
    problem: Problem, plan: SolvedModel, solver: str, gap: float, seconds: _Seconds
) -> Smallest | None:
    """The same choices and counts as a plan whose model left out some memory, with the memory that they really
    need; None if that takes too long to find."""
    model = Model(restricted_to(problem, chosen(*plan, problem)))
    program, peak = model.program, Rows(model, None).peak
    _only_peak_costs(model, peak)
    everything = np.arange(len(program.names))
    outcome = program.integrate(solver, everything, seconds.per_search, gap, fixed_counts(*plan, model))
    return _as_smallest(model, _whole(program, outcome), 0.0) if len(outcome.values) else None


def _as_smallest(model: Model, outcome: Outcome, bound: float) -> Smallest:
    return Smallest(model, outcome, outcome.objective * UNIT, min(bound, outcome.objective) * UNIT)


def _least(model: Model, solver: str, gap: float, seconds: _Seconds, is_known: bool = False) -> Outcome:
    """Add the memory rows to a model and minimise its peak, in MiB. `is_known`: a plan is known already, so the time is
    `least` even if none is found by then."""
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
    """The outcome with all whole variables rounded: solvers accept values that are only nearly whole."""
    if not len(outcome.values):
        return outcome
    return replace(outcome, values=np.where(program.matrix().whole, np.round(outcome.values), outcome.values))
