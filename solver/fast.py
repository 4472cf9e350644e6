"""Plans by the few ways to run ops that fast ones use, and a proof of how much faster others could be.

On three axes an op has hundreds of ways, and each tensor a flow for each pair of them: a program of millions of
variables, of which a plan uses a thousand. What a plan with a choice costs at least is known without it
(`autopar.solver.network`). So a program is stated of those choices alone that plans up to a limit can make, a limit
that leaves it small. Its best plan is the best of all if it costs no more than the limit; if it costs more, all others
cost at least the limit, or what the program's own bound is.

Without a budget such a limit is soon high enough: where it is not, the dual values of the program's relaxation say what
hides behind compute, and with them the network knows more. A budget costs more than that. The program of few ways, with
all storages of parameters, has a good plan then; the program of all ways that a better plan can use proves how good it
is, or finds that one, if its relaxation begins with the columns of the few.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.clock import cpu_seconds
from autopar.solver.costs import Tables
from autopar.solver.engines import is_highs
from autopar.solver.model import Model
from autopar.solver.network import Network, Weights
from autopar.solver.outcome import NONE, Outcome
from autopar.solver.problem import Problem
from autopar.solver.rows import Rows
from autopar.solver.running import price, run, run_near
from autopar.solver.search import patience_of
from autopar.solver.ways import Kept, Ways, chosen, columns, counts, few
from autopar.solver.windows import SHARE, completed

# Pairs of layouts, a flow each, up to which
_ALL = 30_000  # a program without a budget has all ways at once
_PAIRS = 60_000, 150_000, 600_000  # and one of few ways has few: at the first try, and at others
_READ = 60_000  # and a first plan is read from what is known of the ways, where the best alone are more than this
_SURE = 4_500_000  # at the last one more, if its proof is then sure to be one of all (3 GiB)
_PLAIN = 60_000  # one with a budget has all ways at once
_UNDER_BUDGET = 15_000, 30_000  # and one of few ways few; the relaxation of all begins with the latter
_SLOW = 300_000  # and before all, plans of little memory are, where all are more
_MOST = 1_500_000  # with a budget all ways are looked at, after few: with more the program would be too large
_PART, _NEAR = 1 / 3, 5e-3  # of the time that is left: what few ways may take before others; how near their plan is
_SECONDS = 15.0  # at least, for a faster one than a plan of the least memory, which may be ten times as slow
_FIRST = 1 / 10  # the same without a budget: once a plan is there, the ways that are left are few

_NONE_FITS = Outcome("infeasible", NONE, math.inf, math.inf)
_SHORT = TimeLimitError, MemoryError  # for want of which a proof, but not the plan, is given up
_EPSILON = 1e-9  # by which floating point may be wrong, relatively


Small = tuple[float, tuple[Model, Outcome] | None]  # bytes that any plan needs, and a plan of little memory


@dataclass
class Fast:
    """Fast plans of problems of one graph, whose ops have the same choices."""

    solver: str
    gap: float
    _tables: Tables = field(default_factory=Tables)
    _network: Network | None = None

    def pairs(self, problem: Problem) -> int:
        """How many pairs of layouts a problem's tensors have, at their ends."""
        ways = Ways(problem, self._tables)
        return ways.pairs(ways.all)

    def free(self, problem: Problem, time_limit: float) -> tuple[Model, Outcome]:
        """The fastest plan without a budget: its model, of all ways or of few, and the outcome; its status and bound
        are of all ways."""
        ways, end = Ways(problem, self._tables), cpu_seconds() + time_limit
        if ways.pairs(ways.all) <= _ALL:
            return self._all(problem, time_limit)
        network = self._known(problem)
        known: Kept = [some == some.min() for some in network.least]
        best: tuple[Model, Outcome] | None = None
        bound, highest = network.bound, math.inf
        if ways.pairs(known) > _READ:
            best = self._decoded(problem, network, max(end - cpu_seconds(), 0.0))
            if best is not None:
                known, highest = chosen(*best, problem), best[1].objective * (1 + _EPSILON)
        for most in _PAIRS:
            if best is not None and (cpu_seconds() > end or self._is_near(best[1], bound)):
                break
            kept, limit = ways.up_to(network.least, known, most, highest)
            if best is not None and most == _PAIRS[-1] and not self._is_near(best[1], limit):
                sure = ways.up_to(network.least, known, _SURE, highest)
                kept, limit = sure if self._is_near(best[1], sure[1]) else (kept, limit)
            if best is not None and all(map(np.array_equal, kept, known)):
                continue  # that plan again
            with suppress(InfeasibleError, *(_SHORT if best is not None else [])):
                model = Model(few(problem, kept), tables=self._tables)
                start = self._completed(model, *best) if best is not None else None
                left = max(end - cpu_seconds(), 0.0)
                is_last = most == _PAIRS[-1] or limit >= highest
                seconds = left if is_last else _FIRST * left
                outcome = run(model, self.solver, seconds, self.gap, patience=patience_of(left), best=start)
                if len(outcome.values):
                    bound = max(bound, min(outcome.bound, limit * (1 - _EPSILON)))
                    if best is None or outcome.objective < best[1].objective:
                        best, known = (model, outcome), chosen(model, outcome, problem)
                        highest = outcome.objective * (1 + _EPSILON)
                    if self._is_near(outcome, bound) or most == _PAIRS[-1]:
                        break
                    weigh(network, model, self.solver, end - cpu_seconds())
                    bound = max(bound, network.bound)
        if best is None:
            return self._all(problem, end - cpu_seconds())
        return best[0], self._judged(best[1], bound)

    def within(
        self,
        problem: Problem,
        budget_bytes: float,
        time_limit: float,
        *,
        bound: float = 0.0,
        any_plan: bool = False,
        small: Callable[[], Small] | None = None,
    ) -> tuple[Model, Outcome, bool]:
        """The fastest plan within a budget, as `free`; and whether all ways were looked at: none fits where none is
        found then. `bound`: what a plan without the budget costs at least. `any_plan`: one found among few ways will
        do, and none after the limit. `small`: tells what memory any plan needs, asked where few ways have none that
        fits, or none in time, and all are so many that they may take minutes to their first plan.

        Raises TimeLimitError where none is found in time.
        """
        patience = time_limit if any_plan else None
        ways, end = Ways(problem, self._tables), cpu_seconds() + time_limit
        many = ways.pairs(ways.all)
        if many <= _PLAIN:
            model = self._with_rows(problem, budget_bytes)
            return model, run(model, self.solver, time_limit, self.gap, patience=patience), True
        least = self._known(problem).least
        stored = [problem.memory.is_parameter(op.node) for op in problem.ops]
        known: Kept = [(some == some.min()) | mine for some, mine in zip(least, stored, strict=True)]
        best: tuple[Model, Outcome] | None = None
        late: TimeLimitError | None = None
        bound, is_all = max(bound, self._known(problem).bound), many <= _MOST
        small = small if many > _SLOW else None
        for most in _UNDER_BUDGET:
            kept, limit = ways.up_to(least, known, most, math.inf)
            is_last = not is_all and most == _UNDER_BUDGET[-1]
            left = max(end - cpu_seconds(), 0.0)
            seconds, gap = (left, self.gap) if is_last else (_PART * left, max(self.gap, _NEAR))
            waits = patience if is_last and small is None else seconds
            late, short = None, _SHORT if best is not None else ()
            with suppress(InfeasibleError, *short):
                model = self._with_rows(few(problem, kept), budget_bytes)
                start = self._completed(model, *best) if best is not None else None
                try:
                    found = run(model, self.solver, seconds, gap, patience=waits, best=start)
                except TimeLimitError as error:
                    if best is not None:
                        raise
                    late = error
                    continue
                if len(found.values):
                    best = model, found
                    bound = max(bound, min(found.bound, limit * (1 - _EPSILON)))
                    known = [mine | one for mine, one in zip(known, chosen(model, found, problem), strict=True)]
                    if is_all or any_plan or self._is_near(found, bound):
                        break
        if best is None and small is not None:
            with suppress(TimeLimitError):
                needed, plan = small()
                if needed > budget_bytes:
                    return self._with_rows(few(problem, known), budget_bytes), _NONE_FITS, True
                if plan is not None:
                    seconds = max(_PART * (end - cpu_seconds()), _SECONDS)
                    best = self._faster(problem, budget_bytes, *plan, seconds)
            if best is not None and (not is_all or cpu_seconds() > end):
                return best[0], self._judged(best[1], bound), False
        if best is None and not is_all:
            if late is not None:
                raise late
            return self._with_rows(few(problem, known), budget_bytes), _NONE_FITS, False
        limit = best[1].objective * (1 + _EPSILON) if best is not None else math.inf
        kept = [(some <= limit) | mine for some, mine in zip(least, known, strict=True)]  # all that a better plan uses
        if best is not None and (any_plan or self._is_near(best[1], bound) or ways.pairs(kept) > _MOST):
            return best[0], self._judged(best[1], bound), False
        with suppress(*([MemoryError] if best is not None else [])):
            model = self._with_rows(few(problem, kept), budget_bytes)
            start = self._completed(model, *best) if best is not None else None
            some, _ = ways.up_to(least, known, _UNDER_BUDGET[-1], limit)
            first = columns(model, [mine[there] for mine, there in zip(some, kept, strict=True)])
            left = max(end - cpu_seconds(), 0.0)
            outcome = run(model, self.solver, left, self.gap, patience=patience, best=start, first=first)
            bound = max(bound, min(outcome.bound, limit * (1 - _EPSILON)))
            return model, self._judged(outcome, bound) if len(outcome.values) else outcome, True
        assert best is not None
        return best[0], self._judged(best[1], bound), False

    def near(
        self, problem: Problem, budget_bytes: float, known: Model, found: Outcome, seconds: float
    ) -> tuple[Model, Outcome] | None:
        """The best plan that some seconds find near one of some of a problem's choices, without a bound; None where
        the rows do not let that one pass."""
        model, best = self._beside(problem, budget_bytes, known, found)
        return (model, run_near(model, best, self.solver, self.gap, seconds)) if best is not None else None

    def _faster(
        self, problem: Problem, budget_bytes: float, known: Model, found: Outcome, seconds: float
    ) -> tuple[Model, Outcome] | None:
        """The fastest plan of few ways and those of a plan that may be far from fast, after some seconds; None where
        the rows do not let that one pass."""
        model, best = self._beside(problem, budget_bytes, known, found)
        if best is None:
            return None
        with suppress(TimeLimitError):
            return model, run(model, self.solver, seconds, max(self.gap, _NEAR), best=best)
        return model, run_near(model, best, self.solver, self.gap, SHARE * seconds)

    def _beside(
        self, problem: Problem, budget_bytes: float, known: Model, found: Outcome
    ) -> tuple[Model, Outcome | None]:
        """A model of few ways and those of a plan, with that plan; None where the rows do not let it pass."""
        ways = Ways(problem, self._tables)
        kept = ways.all
        if ways.pairs(kept) > _PLAIN:
            mine = chosen(known, found, problem)
            kept, _ = ways.up_to(self._known(problem).least, mine, _UNDER_BUDGET[-1], math.inf)
        model = self._with_rows(few(problem, kept), budget_bytes)
        return model, self._completed(model, known, found)

    def _decoded(self, problem: Problem, network: Network, seconds: float) -> tuple[Model, Outcome] | None:
        """The plan that the network's messages tell; None where it runs an op on what it cannot get."""
        with suppress(InfeasibleError, TimeLimitError):
            model = Model(few(problem, network.decoded()), tables=self._tables)
            outcome = run(model, self.solver, seconds, self.gap)
            return (model, outcome) if len(outcome.values) else None
        return None

    def _completed(self, model: Model, known: Model, found: Outcome) -> Outcome | None:
        """A plan that another model has found, as a solution of a model that has its choices too."""
        price(model)
        values = np.zeros(len(model.program.names))
        for variables, mine in zip(model.x, chosen(known, found, model.problem), strict=True):
            values[variables] = mine
        return completed(model.program, self.solver, values, counts(known, found, model))

    def _with_rows(self, problem: Problem, budget_bytes: float) -> Model:
        model = Model(problem, tables=self._tables)
        Rows(model, budget_bytes)
        return model

    def _all(self, problem: Problem, time_limit: float) -> tuple[Model, Outcome]:
        model = Model(problem, tables=self._tables)
        return model, run(model, self.solver, time_limit, self.gap)

    def _known(self, problem: Problem) -> Network:
        if self._network is None:
            self._network = Network(problem, self._tables)
            self._network.climb()
        return self._network

    def _judged(self, outcome: Outcome, bound: float) -> Outcome:
        """An outcome with this bound."""
        status = "optimal" if self._is_near(outcome, bound) else "feasible"
        return replace(outcome, status=status, bound=min(bound, outcome.objective))

    def _is_near(self, outcome: Outcome, bound: float) -> bool:
        return outcome.objective - bound <= self.gap * outcome.objective


def weigh(network: Network, model: Model, solver: str, seconds: float) -> None:
    """Let what hides behind compute count as in the relaxation of a program, and what each way costs be found anew."""
    if model.overlap is None or seconds <= 0 or not is_highs(solver):
        return
    price(model)
    relaxed = model.program.relax(solver, seconds, {})
    if relaxed.status != "optimal":
        return
    part, duals = model.overlap.part, {key: float(relaxed.duals[row]) for key, row in model.overlap.rows.items()}
    moved = {key: min(1.0, 1 + part * dual) for key, dual in duals.items() if key[2] >= 0}
    network.weigh(Weights(part, moved, {key: max(0.0, -dual) for key, dual in duals.items() if key[2] < 0}))
    network.climb()
