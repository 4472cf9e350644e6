"""The fastest plan within a budget: first among few choices of each op, then among all that a better plan can use.

A program of few choices, with all choices of how parameters are stored, mostly has a good plan. The program of all
choices that a better plan can use then proves how good this plan is, or finds the better one; its relaxation starts
with the columns of the small program. If neither finds a plan soon, few plans fit or none. Then a plan of little memory
is looked for, which takes a second or two (`solver.search.smallest`). If that plan fits, the search goes on from it;
if not, the search ends with the time limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.outcome import NONE, Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search.choice_subsets import (
    ChoiceSubset,
    ProblemChoices,
    chosen,
    flows_between,
    restricted_to,
)
from autopar.solver.search.pruning import EPSILON, OUT_OF_RESOURCES, Pruner, SolvedModel
from autopar.solver.search.windows import NEIGHBOURHOOD_SHARE
from autopar.solver.seconds.objective import run, run_near

# Sizes of programs under a budget, in pairs of layouts (one flow variable each):
MAX_FLOWS_ALL_CHOICES = 60_000  # up to this size the program has all choices and is solved at once
_MAX_FLOWS_RESTRICTED = 15_000, 30_000  # of the two restricted programs; the relaxation of all starts with as many
_MAX_FLOWS_BETTER_PLANS = 1_500_000  # largest program of all choices that is solved after the restricted ones

# Share of the time left for a restricted program if others follow, and the relative gap to which it is solved:
_RESTRICTED_SHARE, _RESTRICTED_GAP = 1 / 3, 5e-3
_MIN_IMPROVING_SECONDS = 15.0  # to improve a plan of least memory, or the time limit if that is less

_NONE_FITS = Outcome("infeasible", NONE, math.inf, math.inf)


class Small(Protocol):
    """Plans of little memory, computed when first asked for (`solver.search.smallest.LeastMemory`)."""

    @property
    def is_known(self) -> bool:
        """Whether some plan of little memory is known."""

    def fitting(self, budget_bytes: float) -> SolvedModel | None:
        """A known plan that fits the budget, if there is one."""

    def is_too_small(self, budget_bytes: float) -> bool:
        """Whether it is proven that no plan fits the budget."""


def fastest_within(
    pruner: Pruner,
    problem: Problem,
    budget_bytes: float,
    time_limit: float,
    *,
    bound: float = 0.0,
    any_plan: bool = False,
    small: Small | None = None,
) -> tuple[Model, Outcome, bool]:
    """The fastest plan within a budget (model and outcome, as of `Pruner.free`), and whether all choices were searched:
    if so and no plan was found, none fits.

    `bound`: a lower bound in seconds on plans without the budget. `any_plan`: a plan found among few choices is enough,
    and the search ends with the limit even if there is none.

    Raises TimeLimitError if no plan is found in time.
    """
    search = _Search(pruner, problem, budget_bytes, time_limit, any_plan, small, bound)
    if search.flows <= MAX_FLOWS_ALL_CHOICES:
        return search.of_all_at_once()
    return search.of_restricted_before_all()


def fastest_near(
    pruner: Pruner, problem: Problem, budget_bytes: float, plan: SolvedModel, seconds: float
) -> tuple[Model, Outcome] | None:
    """A better plan near a known one, searched for some seconds and without a bound; None if the known plan violates
    the memory rows."""
    model, best = _model_of(pruner, problem, budget_bytes, plan)
    return (model, run_near(model, best, pruner.solver, pruner.gap, seconds)) if best is not None else None


@dataclass
class _Search:
    """The search for one plan and its state: the `best` plan so far, a lower `bound`, and `late`, the error of the last
    restricted program if its time ran out; `flows`: how many flows all choices have."""

    pruner: Pruner
    problem: Problem
    budget_bytes: float
    time_limit: float
    any_plan: bool
    small: Small | None
    bound: float
    best: SolvedModel | None = None
    late: TimeLimitError | None = None
    end: float = field(init=False)
    choices: ProblemChoices = field(init=False)
    flows: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = cpu_seconds() + self.time_limit
        self.choices = self.pruner.choices(self.problem)
        self.flows = self.choices.count_flows(self.choices.all)

    @property
    def remaining(self) -> float:
        return max(self.end - cpu_seconds(), 0.0)

    def patience(self) -> float | None:
        """How many seconds a first plan may take; None: as many as `search` gives it by default. It is the time left
        if any plan will do, or if a plan of little memory is known, which does not fit."""
        if self.best is None and (self.any_plan or (self.small is not None and self.small.is_known)):
            return self.remaining
        return None

    def _for_faster(self, seconds: float) -> float:
        """How long to improve a plan of least memory, which may be ten times as slow as the fastest one."""
        return max(seconds, min(_MIN_IMPROVING_SECONDS, self.time_limit))

    def of_all_at_once(self) -> tuple[Model, Outcome, bool]:
        model = self._model(self.problem)
        if self.small is None:
            return model, self._run(model, self.remaining, patience=self.patience()), True
        with suppress(TimeLimitError):
            return model, self._run(model, self.remaining, patience=_RESTRICTED_SHARE * self.remaining), True
        small_plan = self.small.fitting(self.budget_bytes)
        start = self.pruner.completed(model, small_plan) if small_plan is not None else None
        if start is not None:
            return model, self._run(model, self._for_faster(self.remaining), best=start), True
        if self.small.is_too_small(self.budget_bytes):
            return model, _NONE_FITS, True
        return model, self._run(model, self.remaining, patience=self.patience()), True

    def of_restricted_before_all(self) -> tuple[Model, Outcome, bool]:
        bounds, required = self.pruner.choice_bounds(self.problem), self.pruner.best_and_stored(self.problem)
        self.bound, is_all = max(self.bound, self.pruner.bound(self.problem)), self.flows <= _MAX_FLOWS_BETTER_PLANS
        required = self._of_restricted(bounds, required, is_all)
        if self.best is None and self.small is not None:
            plan = self.small.fitting(self.budget_bytes)
            self.best = self._faster(plan) if plan is not None else None
            if self.best is not None and (not is_all or not self.remaining):
                return self._judged(self.best, False)
            if self.best is None and not is_all and self.small.is_too_small(self.budget_bytes):
                return self._model(restricted_to(self.problem, required)), _NONE_FITS, True
        if self.best is None and not is_all:
            if self.late is not None:
                raise self.late
            return self._model(restricted_to(self.problem, required)), _NONE_FITS, False
        return self._of_all(bounds, required)

    def _of_restricted(self, bounds: Sequence[Array], required: ChoiceSubset, is_all: bool) -> ChoiceSubset:
        """Solve the restricted programs, the smaller one first; returns `required` and the choices of the best plan."""
        for most in _MAX_FLOWS_RESTRICTED:
            kept, limit = self.choices.up_to(bounds, required, most, math.inf)
            is_last = not is_all and most == _MAX_FLOWS_RESTRICTED[-1]
            seconds, gap = self.remaining, self.pruner.gap
            if not is_last:
                seconds, gap = _RESTRICTED_SHARE * seconds, max(gap, _RESTRICTED_GAP)
            waits = self.patience() if is_last and self.small is None else seconds
            self.late, before = None, self.best
            with suppress(InfeasibleError, *(OUT_OF_RESOURCES if before is not None else ())):
                model = self._model(restricted_to(self.problem, kept))
                start = self.pruner.completed(model, before) if before is not None else None
                try:
                    outcome = self._run(model, seconds, gap, patience=waits, best=start)
                except TimeLimitError as error:
                    if before is not None:
                        raise
                    self.late = error
                    continue
                if len(outcome.values):
                    self.best = model, outcome
                    self.bound = max(self.bound, min(outcome.bound, limit * (1 - EPSILON)))
                    mine = chosen(model, outcome, self.problem)
                    required = [before_choices | other for before_choices, other in zip(required, mine, strict=True)]
                    if is_all or self.any_plan or self.pruner.is_near(outcome, self.bound):
                        break
        return required

    def _of_all(self, bounds: Sequence[Array], required: ChoiceSubset) -> tuple[Model, Outcome, bool]:
        """Solve the program of all choices that a plan better than the best known one can use."""
        best = self.best
        limit = best[1].objective * (1 + EPSILON) if best is not None else math.inf
        kept = [(bound <= limit) | mine for bound, mine in zip(bounds, required, strict=True)]
        if best is not None and (
            self.any_plan
            or self.pruner.is_near(best[1], self.bound)
            or self.choices.count_flows(kept) > _MAX_FLOWS_BETTER_PLANS
        ):
            return self._judged(best, False)
        if self.patience() == 0.0:  # building the program of all choices alone takes seconds
            raise self.late or TimeLimitError("among few ways to run the ops the solver found no plan in time")
        with suppress(*([MemoryError] if best is not None else [])):
            model = self._model(restricted_to(self.problem, kept))
            start = self.pruner.completed(model, best) if best is not None else None
            bound, _ = self.choices.up_to(bounds, required, _MAX_FLOWS_RESTRICTED[-1], limit)
            first = flows_between(model, [mine[is_kept] for mine, is_kept in zip(bound, kept, strict=True)])
            outcome = self._run(model, self.remaining, patience=self.patience(), best=start, first=first)
            self.bound = max(self.bound, min(outcome.bound, limit * (1 - EPSILON)))
            return self._judged((model, outcome), True) if len(outcome.values) else (model, outcome, True)
        assert best is not None
        return self._judged(best, False)

    def _faster(self, plan: SolvedModel) -> SolvedModel | None:
        """The fastest plan found in some seconds among few choices and those of a known plan, which may be slow; None
        if the known plan violates the memory rows."""
        seconds = self._for_faster(_RESTRICTED_SHARE * self.remaining)
        model, best = _model_of(self.pruner, self.problem, self.budget_bytes, plan)
        if best is None:
            return None
        with suppress(TimeLimitError):
            return model, self._run(model, seconds, max(self.pruner.gap, _RESTRICTED_GAP), best=best)
        return model, run_near(model, best, self.pruner.solver, self.pruner.gap, NEIGHBOURHOOD_SHARE * seconds)

    def _judged(self, plan: SolvedModel, is_all: bool) -> tuple[Model, Outcome, bool]:
        model, outcome = plan
        return model, self.pruner.judged(outcome, self.bound), is_all

    def _model(self, problem: Problem) -> Model:
        return _with_rows(self.pruner, problem, self.budget_bytes)

    def _run(
        self,
        model: Model,
        seconds: float,
        gap: float | None = None,
        *,
        patience: float | None = None,
        best: Outcome | None = None,
        first: Array | None = None,
    ) -> Outcome:
        near = self.pruner.gap if gap is None else gap
        return run(model, self.pruner.solver, seconds, near, patience=patience, best=best, first=first)


def _model_of(pruner: Pruner, problem: Problem, budget_bytes: float, plan: SolvedModel) -> tuple[Model, Outcome | None]:
    """A model of few choices and those of a known plan, and this plan as its solution; None for the latter if the plan
    violates the memory rows."""
    choices = pruner.choices(problem)
    kept = choices.all
    if choices.count_flows(kept) > MAX_FLOWS_ALL_CHOICES:
        bounds, required = pruner.choice_bounds(problem), chosen(*plan, problem)
        kept, _ = choices.up_to(bounds, required, _MAX_FLOWS_RESTRICTED[-1], math.inf)
    model = _with_rows(pruner, restricted_to(problem, kept), budget_bytes)
    return model, pruner.completed(model, plan)


def _with_rows(pruner: Pruner, problem: Problem, budget_bytes: float) -> Model:
    model = Model(problem, tables=pruner.tables)
    Rows(model, budget_bytes)
    return model
