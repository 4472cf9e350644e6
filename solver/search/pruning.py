"""Pruning: solve a small program of the choices that fast plans use, and prove how much faster any other plan can be.

On a mesh of three axes an op has hundreds of strategies, and a tensor has one flow variable for each pair of layouts at
its two ends. The full program then has millions of variables, while a plan sets about a thousand of them. But a lower
bound on the cost of every plan that makes a given choice is known without a program (`solver.search.network`). So the
restricted program has only the choices whose bound is at most a limit, and the limit is set such that the program stays
small. Every plan outside the restricted program costs more than the limit. So if its best plan costs no more than the
limit, that plan is optimal; otherwise the lesser of the limit and the program's own bound is a bound on all plans.

Without a budget, a limit that proves the plan is mostly reached soon. If it is not, the dual values of the program's
relaxation say how much communication hides behind compute; weighed with them, the network gives better bounds. The
search under a budget is in `solver.search.under_budget`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.engines import is_highs
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.search.choice_subsets import ChoiceSubset, ProblemChoices, chosen, fixed_counts, restricted_to
from autopar.solver.search.network import Network, Weights
from autopar.solver.search.search import patience_of
from autopar.solver.search.windows import completed
from autopar.solver.seconds.costs import Tables
from autopar.solver.seconds.objective import price, run

# Sizes of programs without a budget, in pairs of layouts (one flow variable each):
_MAX_FLOWS_ALL_CHOICES = 30_000  # up to this size the program has all choices and is solved at once
_MAX_FLOWS_RESTRICTED = 60_000, 150_000, 600_000  # of the restricted program at the first, second and third try
_MAX_FLOWS_CHEAPEST = 60_000  # if the cheapest choices alone exceed this, a first plan is decoded from messages
_MAX_FLOWS_PROOF = 4_500_000  # at the last try (3 GiB), if its limit is high enough to prove the known plan optimal

# Shares of the time that is left:
_EARLY_TRY_SHARE = 1 / 10  # for a try that is not the last: once a plan is known, its cost excludes most choices
_NEXT_RELAXATION_SHARE = 1 / 2  # if the relaxation of the next try is expected to take more, this try is the last

OUT_OF_RESOURCES = TimeLimitError, MemoryError  # errors after which a known plan is kept and only the proof is given up
EPSILON = 1e-9  # relative error allowed for floating point

SolvedModel = tuple[Model, Outcome]
"""A plan: a model, and the outcome that says which of the model's choices the plan makes."""


@dataclass
class Pruner:
    """Solves problems of one graph, whose ops all have the same choices, by restricted programs. The network's bounds
    are computed once and used for all of these problems."""

    solver: str
    gap: float
    tables: Tables = field(default_factory=Tables)
    _network: Network | None = None

    def count_flows(self, problem: Problem) -> int:
        """The number of pairs of layouts over all tensors of a problem: one layout at the source, one at the use."""
        choices = self.choices(problem)
        return choices.count_flows(choices.all)

    def choices(self, problem: Problem) -> ProblemChoices:
        return ProblemChoices(problem, self.tables)

    def choice_bounds(self, problem: Problem) -> Sequence[Array]:
        """For each op, an array over its choices: a lower bound in seconds on all plans that make the choice."""
        return self._climbed_network(problem).least

    def best_and_stored(self, problem: Problem) -> ChoiceSubset:
        """The choices of least bound of each op, and all choices of parameters (how they are stored)."""
        bounds, stored = self.choice_bounds(problem), (problem.memory.is_parameter(op.node) for op in problem.ops)
        return [(bound == bound.min()) | of_op for bound, of_op in zip(bounds, stored, strict=True)]

    def bound(self, problem: Problem) -> float:
        """A lower bound in seconds on all plans."""
        return self._climbed_network(problem).bound

    def free(self, problem: Problem, time_limit: float) -> SolvedModel:
        """The fastest plan without a budget. The model may be a restricted one, but the status and bound of the outcome
        hold for the problem with all its choices."""
        choices, end = self.choices(problem), cpu_seconds() + time_limit
        if choices.count_flows(choices.all) <= _MAX_FLOWS_ALL_CHOICES:
            return self._all(problem, time_limit)
        network = self._climbed_network(problem)
        required: ChoiceSubset = [least == least.min() for least in network.least]
        best: SolvedModel | None = None
        bound, highest = network.bound, math.inf
        if choices.count_flows(required) > _MAX_FLOWS_CHEAPEST:
            best = self._decoded(problem, network, max(end - cpu_seconds(), 0.0))
            if best is not None:
                required, highest = chosen(*best, problem), best[1].objective * (1 + EPSILON)
        for most, next_most in zip(_MAX_FLOWS_RESTRICTED, (*_MAX_FLOWS_RESTRICTED[1:], math.inf), strict=True):
            if best is not None and (cpu_seconds() > end or self.is_near(best[1], bound)):
                break
            kept, limit = choices.up_to(network.least, required, most, highest)
            if best is not None and most == _MAX_FLOWS_RESTRICTED[-1] and not self.is_near(best[1], limit):
                sure = choices.up_to(network.least, required, _MAX_FLOWS_PROOF, highest)
                kept, limit = sure if self.is_near(best[1], sure[1]) else (kept, limit)
            if best is not None and all(map(np.array_equal, kept, required)):
                continue  # only the known plan would be found again
            with suppress(InfeasibleError, *(OUT_OF_RESOURCES if best is not None else [])):
                model = Model(restricted_to(problem, kept), tables=self.tables)
                outcome = self._tried(model, best, end, math.inf if limit >= highest else next_most / most)
                if outcome is None:
                    break
                if len(outcome.values):
                    bound = max(bound, min(outcome.bound, limit * (1 - EPSILON)))
                    if best is None or outcome.objective < best[1].objective:
                        best, required = (model, outcome), chosen(model, outcome, problem)
                        highest = outcome.objective * (1 + EPSILON)
                    if self.is_near(outcome, bound) or most == _MAX_FLOWS_RESTRICTED[-1]:
                        break
                    weigh(network, model, self.solver, end - cpu_seconds())
                    bound = max(bound, network.bound)
        if best is None:
            return self._all(problem, end - cpu_seconds())
        return best[0], self.judged(best[1], bound)

    def _tried(self, model: Model, best: SolvedModel | None, end: float, growth: float) -> Outcome | None:
        """The fastest plan of a restricted model, where `best` is the fastest known; None if its relaxation takes all
        the time that is left. `growth`: how many times as large the next restricted model would be (inf: this one is
        the last)."""
        start = self.completed(model, best) if best is not None else None
        remaining, took = max(end - cpu_seconds(), 0.0), 0.0
        if best is not None:  # the relaxation may take all the time, as its bound is of use
            price(model)
            if model.program.root(self.solver, remaining).status == "stopped":
                return None
            took, remaining = remaining - max(end - cpu_seconds(), 0.0), max(end - cpu_seconds(), 0.0)
        is_last = growth == math.inf or took * growth > _NEXT_RELAXATION_SHARE * remaining
        seconds = remaining if is_last else _EARLY_TRY_SHARE * remaining
        return run(model, self.solver, seconds, self.gap, patience=patience_of(remaining), best=start)

    def _decoded(self, problem: Problem, network: Network, seconds: float) -> SolvedModel | None:
        """The plan decoded from the network's messages; None if one of its ops cannot get an input in its layout."""
        with suppress(InfeasibleError, TimeLimitError):
            model = Model(restricted_to(problem, network.decoded()), tables=self.tables)
            outcome = run(model, self.solver, seconds, self.gap)
            return (model, outcome) if len(outcome.values) else None
        return None

    def completed(self, model: Model, plan: SolvedModel) -> Outcome | None:
        """A plan of another model as a solution of this `model`, which has at least the plan's choices."""
        price(model)
        values = np.zeros(len(model.program.names))
        for variables, of_op in zip(model.x, chosen(*plan, model.problem), strict=True):
            values[variables] = of_op
        return completed(model.program, self.solver, values, fixed_counts(*plan, model))

    def _all(self, problem: Problem, time_limit: float) -> SolvedModel:
        model = Model(problem, tables=self.tables)
        return model, run(model, self.solver, time_limit, self.gap)

    def _climbed_network(self, problem: Problem) -> Network:
        if self._network is None:
            self._network = Network(problem, self.tables)
            self._network.climb()
        return self._network

    def judged(self, outcome: Outcome, bound: float) -> Outcome:
        """The outcome with this bound, and the status that follows from it."""
        status = "optimal" if self.is_near(outcome, bound) else "feasible"
        return replace(outcome, status=status, bound=min(bound, outcome.objective))

    def is_near(self, outcome: Outcome, bound: float) -> bool:
        return outcome.objective - bound <= self.gap * outcome.objective


def weigh(network: Network, model: Model, solver: str, seconds: float) -> None:
    """Weigh communication and compute by the dual values of a model's relaxation, and raise the bounds again."""
    if model.overlap is None or seconds <= 0 or not is_highs(solver):
        return
    price(model)
    relaxed = model.program.root(solver, seconds)
    if relaxed.status != "optimal":
        return
    part, duals = model.overlap.part, {key: float(relaxed.duals[row]) for key, row in model.overlap.rows.items()}
    weights = {key: min(1.0, 1 + part * dual) for key, dual in duals.items() if key[2] >= 0}
    network.weigh(Weights(part, weights, {key: max(0.0, -dual) for key, dual in duals.items() if key[2] < 0}))
    network.climb()
