"""Subsets of the choices of a problem's ops (`ChoiceSubset`), their number of flows, and plans as such subsets."""

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

ChoiceSubset = Sequence[Array]  # for each op, a boolean array: whether each of its choices is in the subset


@dataclass
class ProblemChoices:
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
    def all(self) -> ChoiceSubset:
        return [np.ones(len(op.choices), dtype=bool) for op in self.problem.ops]

    def count_flows(self, choices: ChoiceSubset) -> int:
        """How many flows there are with these choices: by tensor and use, a pair for each two layouts."""
        found = 0
        for source, ports, reader, wants in self._ends.values():
            found += _different(ports[choices[source]]) * _different(wants[choices[reader]])
        return found

    def up_to(
        self, bounds: Sequence[Array], required: ChoiceSubset, max_flows: int, limit: float
    ) -> tuple[ChoiceSubset, float]:
        """The `required` choices and those whose bound is at most a limit; and the limit, the highest up to `limit`
        with which there are at most `max_flows` flows."""

        def of(limit: float) -> ChoiceSubset:
            return [(some <= limit) | mine for some, mine in zip(bounds, required, strict=True)]

        if self.count_flows(of(limit)) <= max_flows:
            return of(limit), limit
        low, high = 0.0, min(limit, max(float(some.max()) for some in bounds))
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.count_flows(of(middle)) <= max_flows else (low, middle)
        return of(low), low


def restricted_to(problem: Problem, choices: ChoiceSubset) -> Problem:
    """The problem restricted to these choices."""
    found: dict[tuple[int, bytes], tuple[Choice, ...]] = {}  # ops that shared their choices still do
    ops = []
    for op, some in zip(problem.ops, choices, strict=True):
        key = id(op.choices), some.tobytes()
        if key not in found:
            found[key] = tuple(choice for choice, there in zip(op.choices, some.tolist(), strict=True) if there)
        ops.append(replace(op, choices=found[key]))
    return replace(problem, ops=tuple(ops))


def chosen(model: Model, outcome: Outcome, problem: Problem) -> ChoiceSubset:
    """Which choices of a problem a plan makes; the plan's model has all of the problem's choices or some of them."""
    found = []
    for variables, mine, op in zip(model.x, model.problem.ops, problem.ops, strict=True):
        one = mine.choices[int(np.argmax(outcome.values[variables]))]
        found.append(np.array([choice is one for choice in op.choices]))
    return found


def fixed_counts(model: Model, outcome: Outcome, of: Model) -> Bounds:
    """The counts of recomputed blocks of an outcome, as bounds that fix the counts of another model (`of`) to them."""
    found: Bounds = {}
    for stage, some in model.recomputed.items():
        for r, its, q in zip(some, of.recomputed[stage], of.any_recomputed[stage], strict=True):
            many = float(round(outcome.values[r]))
            found = {**found, q: (min(many, 1.0),) * 2, its: (many, many)}
    return found


def flows_between(model: Model, choices: ChoiceSubset) -> Array:
    """A boolean array over a model's variables: which are flows between these choices."""
    found = np.zeros(len(model.program.names), dtype=bool)
    for flow in model.flows:
        ports = _any(model.costs.ports(flow.tensor).values(), choices[flow.tensor.source])
        wants = _any(model.costs.wanted(flow.tensor, flow.use).values(), choices[flow.use.op])
        some = flow.numbers[np.ix_(ports, wants)]
        found[some[some >= 0]] = True
    return found


def _any(groups: Iterable[Sequence[int]], choices: Array) -> Array:
    return np.array([bool(choices[list(some)].any()) for some in groups])


def _different(places: Array) -> int:
    return int(np.count_nonzero(np.bincount(places)))


def _places(choices: Iterable[Sequence[int]], many: int) -> Array:
    """For each of `many` choices, the index of the list that contains it."""
    found = np.zeros(many, dtype=np.int64)
    for place, some in enumerate(choices):
        found[list(some)] = place
    return found
