"""Subsets of the choices of a problem's ops (`Kept`), how many flows they have, and plans as such subsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.solver.linear.outcome import Bounds, Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.model import Model
from autopar.solver.problem import Choice, Problem
from autopar.solver.seconds.costs import Costs, Tables

_BISECTION_STEPS = 30  # bisection steps in which a cost limit is found

Kept = Sequence[Array]  # for each op, a boolean array: whether each of its choices is kept


@dataclass
class Ways:
    """The choices of a problem's ops, and the number of flows that a subset of them has."""

    problem: Problem
    tables: Tables = field(default_factory=Tables)

    def __post_init__(self) -> None:
        costs, many = Costs(self.problem, self.tables), [len(op.choices) for op in self.problem.ops]
        self._ends: dict[tuple[int, int, int, int], tuple[int, Array, int, Array]] = {}
        places: dict[int, Array] = {}

        def placed(choices: Mapping[Any, Sequence[int]], many: int) -> Array:
            if id(choices) not in places:
                places[id(choices)] = _places(choices.values(), many)
            return places[id(choices)]

        for tensor in self.problem.tensors:
            ports = placed(costs.ports(tensor), many[tensor.source])
            for use in tensor.uses:
                wants = placed(costs.wanted(tensor, use), many[use.op])
                ends = self.problem.decides(tensor.source), tensor.output, self.problem.decides(use.op), use.index
                self._ends.setdefault(ends, (tensor.source, ports, use.op, wants))  # equal keys share one flow

    @property
    def all(self) -> Kept:
        return [np.ones(len(op.choices), dtype=bool) for op in self.problem.ops]

    def pairs(self, kept: Kept) -> int:
        """How many flows there are with these choices: by tensor and use, a pair for each two layouts."""
        found = 0
        for source, ports, reader, wants in self._ends.values():
            found += _different(ports[kept[source]]) * _different(wants[kept[reader]])
        return found

    def up_to(self, least: Sequence[Array], known: Kept, most: int, limit: float) -> tuple[Kept, float]:
        """The `known` choices and those whose bound (`least`) is at most a limit; and the limit, the highest up to
        `limit` with which there are at most `most` flows."""

        def of(limit: float) -> Kept:
            return [(some <= limit) | mine for some, mine in zip(least, known, strict=True)]

        if self.pairs(of(limit)) <= most:
            return of(limit), limit
        low, high = 0.0, min(limit, max(float(some.max()) for some in least))
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.pairs(of(middle)) <= most else (low, middle)
        return of(low), low


def few(problem: Problem, kept: Kept) -> Problem:
    """The problem restricted to these choices."""
    found: dict[tuple[int, bytes], tuple[Choice, ...]] = {}  # ops that shared their choices still do
    ops = []
    for op, some in zip(problem.ops, kept, strict=True):
        key = id(op.choices), some.tobytes()
        if key not in found:
            found[key] = tuple(choice for choice, there in zip(op.choices, some.tolist(), strict=True) if there)
        ops.append(replace(op, choices=found[key]))
    return replace(problem, ops=tuple(ops))


def chosen(model: Model, outcome: Outcome, problem: Problem) -> Kept:
    """Which choices of a problem a plan makes; the plan's model has all of the problem's choices or some of them."""
    found = []
    for variables, mine, op in zip(model.x, model.problem.ops, problem.ops, strict=True):
        one = mine.choices[int(np.argmax(outcome.values[variables]))]
        found.append(np.array([choice is one for choice in op.choices]))
    return found


def counts(model: Model, outcome: Outcome, of: Model) -> Bounds:
    """The counts of recomputed blocks of an outcome, as bounds that fix the counts of another model (`of`) to them."""
    found: Bounds = {}
    for stage, some in model.recomputed.items():
        for r, its, q in zip(some, of.recomputed[stage], of.any_recomputed[stage], strict=True):
            many = float(round(outcome.values[r]))
            found = {**found, q: (min(many, 1.0),) * 2, its: (many, many)}
    return found


def columns(model: Model, kept: Kept) -> Array:
    """A boolean array over a model's variables: which are flows between choices that are kept."""
    found = np.zeros(len(model.program.names), dtype=bool)
    for flow in model.flows:
        ports = _any(model.costs.ports(flow.tensor).values(), kept[flow.tensor.source])
        wants = _any(model.costs.wanted(flow.tensor, flow.use).values(), kept[flow.use.op])
        some = flow.numbers[np.ix_(ports, wants)]
        found[some[some >= 0]] = True
    return found


def _any(choices: Iterable[Sequence[int]], kept: Array) -> Array:
    return np.array([bool(kept[list(some)].any()) for some in choices])


def _different(places: Array) -> int:
    return int(np.count_nonzero(np.bincount(places)))


def _places(choices: Iterable[Sequence[int]], many: int) -> Array:
    """For each of `many` choices, the index of the list that contains it."""
    found = np.zeros(many, dtype=np.int64)
    for place, some in enumerate(choices):
        found[list(some)] = place
    return found
