"""Pruning: a program of the few strategies that fast plans use, and a proof of how much faster others could be.

On three axes an op has hundreds of strategies, and each tensor a flow for each pair of them: a program of millions of
variables, of which a plan uses a thousand. A lower bound on the cost of any plan with a given choice is known without
that program (`solver.search.network`). So a program is stated of those choices alone whose bound is below a limit that
leaves it small. Its best plan is the best of all if it costs no more than the limit; if it costs more, all others cost
at least the limit, or the program's own bound.

Without a budget such a limit is soon high enough: where it is not, the dual values of the program's relaxation say what
hides behind compute, and with them the network knows more. With a budget: `solver.search.under_budget`.
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
from autopar.solver.search.network import Network, Weights
from autopar.solver.search.search import patience_of
from autopar.solver.search.ways import Kept, Ways, chosen, counts, few
from autopar.solver.search.windows import completed
from autopar.solver.seconds.costs import Tables
from autopar.solver.seconds.objective import price, run

# Pairs of layouts, a flow each, up to which
_ALL = 30_000  # a program without a budget has all ways at once
_PAIRS = 60_000, 150_000, 600_000  # and one of few ways has few: at the first try, and at others
_READ = 60_000  # and a first plan is read from what is known of the ways, where the best alone are more than this
_SURE = 4_500_000  # at the last one more, if its proof is then sure to be one of all (3 GiB)
_FIRST = 1 / 10  # of the time that is left, for the first of these: once a plan is there, few ways are left
_NEXT = 1 / 2  # and the part of it that the relaxation of the next may take; else this one is the last

SHORT = TimeLimitError, MemoryError  # for want of which a proof, but not the plan, is given up
EPSILON = 1e-9  # by which floating point may be wrong, relatively

Found = tuple[Model, Outcome]
"""A plan: what an outcome chooses of a model's choices."""


@dataclass
class Pruner:
    """Solves problems of one graph, whose ops have the same choices, with few of these; what it learns of one helps the
    next."""

    solver: str
    gap: float
    tables: Tables = field(default_factory=Tables)
    _network: Network | None = None

    def pairs(self, problem: Problem) -> int:
        """How many pairs of layouts a problem's tensors have, at their ends."""
        ways = self.ways(problem)
        return ways.pairs(ways.all)

    def ways(self, problem: Problem) -> Ways:
        return Ways(problem, self.tables)

    def least(self, problem: Problem) -> Sequence[Array]:
        """Seconds that a plan with a choice takes at least, by op."""
        return self._known(problem).least

    def best_and_stored(self, problem: Problem) -> Kept:
        """The ways that cost each op least, and all storages of parameters."""
        stored = (problem.memory.is_parameter(op.node) for op in problem.ops)
        return [(some == some.min()) | mine for some, mine in zip(self.least(problem), stored, strict=True)]

    def bound(self, problem: Problem) -> float:
        """Seconds that any plan takes at least."""
        return self._known(problem).bound

    def free(self, problem: Problem, time_limit: float) -> Found:
        """The fastest plan without a budget: its model, of all ways or of few, and the outcome; its status and bound
        are of all ways."""
        ways, end = self.ways(problem), cpu_seconds() + time_limit
        if ways.pairs(ways.all) <= _ALL:
            return self._all(problem, time_limit)
        network = self._known(problem)
        known: Kept = [some == some.min() for some in network.least]
        best: Found | None = None
        bound, highest = network.bound, math.inf
        if ways.pairs(known) > _READ:
            best = self._decoded(problem, network, max(end - cpu_seconds(), 0.0))
            if best is not None:
                known, highest = chosen(*best, problem), best[1].objective * (1 + EPSILON)
        for most, more in zip(_PAIRS, (*_PAIRS[1:], math.inf), strict=True):
            if best is not None and (cpu_seconds() > end or self.is_near(best[1], bound)):
                break
            kept, limit = ways.up_to(network.least, known, most, highest)
            if best is not None and most == _PAIRS[-1] and not self.is_near(best[1], limit):
                sure = ways.up_to(network.least, known, _SURE, highest)
                kept, limit = sure if self.is_near(best[1], sure[1]) else (kept, limit)
            if best is not None and all(map(np.array_equal, kept, known)):
                continue  # that plan again
            with suppress(InfeasibleError, *(SHORT if best is not None else [])):
                model = Model(few(problem, kept), tables=self.tables)
                start = self.completed(model, best) if best is not None else None
                left, took = max(end - cpu_seconds(), 0.0), 0.0
                if best is not None:  # a relaxation may take all of the time, since its bound counts; a search may not
                    price(model)
                    if model.program.root(self.solver, left).status == "stopped":
                        break
                    took, left = left - max(end - cpu_seconds(), 0.0), max(end - cpu_seconds(), 0.0)
                is_last = more == math.inf or limit >= highest or took * more / most > _NEXT * left
                seconds = left if is_last else _FIRST * left
                outcome = run(model, self.solver, seconds, self.gap, patience=patience_of(left), best=start)
                if len(outcome.values):
                    bound = max(bound, min(outcome.bound, limit * (1 - EPSILON)))
                    if best is None or outcome.objective < best[1].objective:
                        best, known = (model, outcome), chosen(model, outcome, problem)
                        highest = outcome.objective * (1 + EPSILON)
                    if self.is_near(outcome, bound) or most == _PAIRS[-1]:
                        break
                    weigh(network, model, self.solver, end - cpu_seconds())
                    bound = max(bound, network.bound)
        if best is None:
            return self._all(problem, end - cpu_seconds())
        return best[0], self.judged(best[1], bound)

    def _decoded(self, problem: Problem, network: Network, seconds: float) -> Found | None:
        """The plan that the network's messages tell; None where it runs an op on what it cannot get."""
        with suppress(InfeasibleError, TimeLimitError):
            model = Model(few(problem, network.decoded()), tables=self.tables)
            outcome = run(model, self.solver, seconds, self.gap)
            return (model, outcome) if len(outcome.values) else None
        return None

    def completed(self, model: Model, known: Found) -> Outcome | None:
        """A plan that another model has found, as a solution of a model that has its choices too."""
        price(model)
        values = np.zeros(len(model.program.names))
        for variables, mine in zip(model.x, chosen(*known, model.problem), strict=True):
            values[variables] = mine
        return completed(model.program, self.solver, values, counts(*known, model))

    def _all(self, problem: Problem, time_limit: float) -> Found:
        model = Model(problem, tables=self.tables)
        return model, run(model, self.solver, time_limit, self.gap)

    def _known(self, problem: Problem) -> Network:
        if self._network is None:
            self._network = Network(problem, self.tables)
            self._network.climb()
        return self._network

    def judged(self, outcome: Outcome, bound: float) -> Outcome:
        """An outcome with this bound."""
        status = "optimal" if self.is_near(outcome, bound) else "feasible"
        return replace(outcome, status=status, bound=min(bound, outcome.objective))

    def is_near(self, outcome: Outcome, bound: float) -> bool:
        return outcome.objective - bound <= self.gap * outcome.objective


def weigh(network: Network, model: Model, solver: str, seconds: float) -> None:
    """Let what hides behind compute count as in the relaxation of a program, and what each way costs be found anew."""
    if model.overlap is None or seconds <= 0 or not is_highs(solver):
        return
    price(model)
    relaxed = model.program.root(solver, seconds)
    if relaxed.status != "optimal":
        return
    part, duals = model.overlap.part, {key: float(relaxed.duals[row]) for key, row in model.overlap.rows.items()}
    moved = {key: min(1.0, 1 + part * dual) for key, dual in duals.items() if key[2] >= 0}
    network.weigh(Weights(part, moved, {key: max(0.0, -dual) for key, dual in duals.items() if key[2] < 0}))
    network.climb()
