"""The fastest plan without a budget, by the few ways to run its ops that fast plans can use.

On three axes an op has hundreds of ways, and each tensor a flow for each pair of them: a program of millions of
variables, of which a plan uses a thousand. What a plan with a choice costs at least is known without it
(`autopar.solver.network`). So the program is stated of those choices alone that plans up to a limit can make, a limit
that leaves it small. Its best plan is the best of all if it costs no more than the limit; if it costs more, all others
cost at least the limit, or what the program's own bound is.

Where that is too far off, the dual values of the program's relaxation say what hides behind compute, and with them the
network knows more, so that a second program can have the limit that proves it, or more ways to find a better plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.errors import InfeasibleError, TimeLimitError
from autopar.solver.clock import cpu_seconds
from autopar.solver.costs import Costs, Tables
from autopar.solver.engines import is_highs
from autopar.solver.linear import Array
from autopar.solver.model import Model
from autopar.solver.network import Network, Weights
from autopar.solver.outcome import WHOLE, Outcome
from autopar.solver.problem import Problem
from autopar.solver.running import price, run

_ALL = 30_000  # pairs of layouts, a flow each, with which a program has all ways
_PAIRS = 60_000, 150_000, 600_000  # that a program of few ways has at most, at the first try and at others
_STEPS = 30  # in which a limit is found
_EPSILON = 1e-9  # by which floating point may be wrong, relatively

Kept = Sequence[Array]  # by op, whether each choice is there


@dataclass
class Ways:
    """The choices of a problem, and how many flows some of them make."""

    problem: Problem
    tables: Tables = field(default_factory=dict)

    def __post_init__(self) -> None:
        costs, many = Costs(self.problem, self.tables), [len(op.choices) for op in self.problem.ops]
        self._ends = []
        for tensor in self.problem.tensors:
            ports = _places(costs.ports(tensor).values(), many[tensor.source])
            for use in tensor.uses:
                wants = _places(costs.wanted(tensor, use).values(), many[use.op])
                self._ends.append((tensor.source, ports, use.op, wants))

    def pairs(self, kept: Kept) -> int:
        """How many flows there are."""
        found = 0
        for source, ports, reader, wants in self._ends:
            found += len(np.unique(ports[kept[source]])) * len(np.unique(wants[kept[reader]]))
        return found

    def few(self, kept: Kept) -> Problem:
        """The problem of these choices."""
        ops = tuple(
            replace(op, choices=tuple(choice for choice, there in zip(op.choices, some.tolist(), strict=True) if there))
            for op, some in zip(self.problem.ops, kept, strict=True)
        )
        return replace(self.problem, ops=ops)

    def up_to(self, least: Sequence[Array], known: Kept, most: int, limit: float) -> tuple[Kept, float]:
        """The choices of plans up to a limit, the highest up to this one with so many flows; and those `known`."""

        def of(limit: float) -> Kept:
            return [(some <= limit) | mine for some, mine in zip(least, known, strict=True)]

        if self.pairs(of(limit)) <= most:
            return of(limit), limit
        low, high = 0.0, min(limit, max(float(some.max()) for some in least))
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.pairs(of(middle)) <= most else (low, middle)
        return of(low), low


def fastest(problem: Problem, solver: str, time_limit: float, gap: float) -> tuple[Model, Outcome]:
    """The fastest plan of a problem without a budget: its model, of all ways or of few, and the outcome; its status and
    bound are of all ways."""
    ways, end = Ways(problem), cpu_seconds() + time_limit
    if ways.pairs([np.ones(len(op.choices), dtype=bool) for op in problem.ops]) <= _ALL:
        model = Model(problem, tables=ways.tables)
        return model, run(model, solver, time_limit, gap)
    network = Network(problem, ways.tables)
    network.climb()
    best: tuple[Model, Outcome] | None = None
    known: Kept = [some == some.min() for some in network.least]
    bound, highest = network.bound, math.inf
    for most in _PAIRS:
        if best is not None and cpu_seconds() > end:
            break
        kept, limit = ways.up_to(network.least, known, most, highest)
        with suppress(InfeasibleError, *([TimeLimitError] if best is not None else [])):
            model = Model(ways.few(kept), tables=ways.tables)
            outcome = run(model, solver, end - cpu_seconds(), gap)
            if len(outcome.values):
                bound = max(bound, min(outcome.bound, limit * (1 - _EPSILON)))
                if best is None or outcome.objective < best[1].objective:
                    best, known = (model, outcome), _chosen(model, outcome, kept)
                    highest = outcome.objective * (1 + _EPSILON)
                if outcome.objective - bound <= gap * outcome.objective or not is_highs(solver):
                    break
                weigh(network, model, solver, end - cpu_seconds())
                bound = max(bound, network.bound)
    if best is None:
        model = Model(problem, tables=ways.tables)
        return model, run(model, solver, end - cpu_seconds(), gap)
    model, outcome = best
    bound = min(bound, outcome.objective)
    near = outcome.objective - bound <= gap * outcome.objective
    return model, replace(outcome, status="optimal" if near else "feasible", bound=bound)


def weigh(network: Network, model: Model, solver: str, seconds: float) -> None:
    """Let what hides behind compute count as in the relaxation of a program, and what each way costs be found anew."""
    if model.overlap is None or seconds <= 0:
        return
    price(model)
    relaxed = model.program.relax(solver, seconds, {})
    if relaxed.status != "optimal":
        return
    part, duals = model.overlap.part, {key: float(relaxed.duals[row]) for key, row in model.overlap.rows.items()}
    moved = {key: min(1.0, 1 + part * dual) for key, dual in duals.items() if key[2] >= 0}
    network.weigh(Weights(part, moved, {key: max(0.0, -dual) for key, dual in duals.items() if key[2] < 0}))
    network.climb()


def _chosen(model: Model, outcome: Outcome, kept: Kept) -> Kept:
    """The choices of a plan that was found among those kept."""
    found = []
    for variables, some in zip(model.x, kept, strict=True):
        mine = np.zeros(len(some), dtype=bool)
        mine[np.flatnonzero(some)[outcome.values[variables] > 1 - WHOLE]] = True
        found.append(mine)
    return found


def _places(choices: Iterable[Sequence[int]], many: int) -> Array:
    """In which of the lists each choice is."""
    found = np.zeros(many, dtype=np.int64)
    for place, some in enumerate(choices):
        found[list(some)] = place
    return found
