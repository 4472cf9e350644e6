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

_BISECTION_STEPS = 30  # steps of the bisection for a cost limit, which is then known to 1e-9 of the range

ChoiceSubset = Sequence[Array]  # for each op, a boolean array: whether each of its choices is in the subset


@dataclass
class ProblemChoices:
    """The choices of a problem's ops, and the number of flows that a subset of them has."""

    problem: Problem
    tables: Tables = field(default_factory=Tables)

    def __post_init__(self) -> None:
        costs, sizes = Costs(self.problem, self.tables), [len(op.choices) for op in self.problem.ops]
        self._ends: dict[tuple[int, int, int, int], tuple[int, Array, int, Array]] = {}
        places: dict[int, Array] = {}

        def placed(choices: Mapping[Any, Sequence[int]], sizes: int) -> Array:
            if id(choices) not in places:
                places[id(choices)] = _places(choices.values(), sizes)
            return places[id(choices)]

        for tensor in self.problem.tensors:
            ports = placed(costs.ports(tensor), sizes[tensor.source])
            for use in tensor.uses:
                wants = placed(costs.wanted(tensor, use), sizes[use.op])
                ends = self.problem.decides(tensor.source), tensor.output, self.problem.decides(use.op), use.index
                self._ends.setdefault(ends, (tensor.source, ports, use.op, wants))  # equal keys share one flow

    @property
    def all(self) -> ChoiceSubset:
        return [np.ones(len(op.choices), dtype=bool) for op in self.problem.ops]

    def count_flows(self, choices: ChoiceSubset) -> int:
        """How many flows there are with these choices: by tensor and use, a pair for each two layouts."""
        flows = 0
        for source, ports, reader, wants in self._ends.values():
            flows += _different(ports[choices[source]]) * _different(wants[choices[reader]])
        return flows

    def up_to(
        self, bounds: Sequence[Array], required: ChoiceSubset, max_flows: int, limit: float
    ) -> tuple[ChoiceSubset, float]:
        """The `required` choices and those whose bound is at most a limit; and the limit, the highest up to `limit`
        with which there are at most `max_flows` flows."""

        def of(limit: float) -> ChoiceSubset:
            return [(bound <= limit) | mine for bound, mine in zip(bounds, required, strict=True)]

        if self.count_flows(of(limit)) <= max_flows:
            return of(limit), limit
        low, high = 0.0, min(limit, max(float(bound.max()) for bound in bounds))
        for _ in range(_BISECTION_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.count_flows(of(middle)) <= max_flows else (low, middle)
        return of(low), low


def restricted_to(problem: Problem, choices: ChoiceSubset) -> Problem:
    """The problem restricted to these choices."""
    kept: dict[tuple[int, bytes], tuple[Choice, ...]] = {}  # ops that shared their choices still do
    ops = []
    for op, mask in zip(problem.ops, choices, strict=True):
        key = id(op.choices), mask.tobytes()
        if key not in kept:
            kept[key] = tuple(choice for choice, is_kept in zip(op.choices, mask.tolist(), strict=True) if is_kept)
        ops.append(replace(op, choices=kept[key]))
    return replace(problem, ops=tuple(ops))


def chosen(model: Model, outcome: Outcome, problem: Problem) -> ChoiceSubset:
    """Which choices of a problem a plan makes; the plan's model has all of the problem's choices or some of them."""
    masks = []
    for variables, restricted_op, op in zip(model.x, model.problem.ops, problem.ops, strict=True):
        decided = restricted_op.choices[int(np.argmax(outcome.values[variables]))]
        masks.append(np.array([choice is decided for choice in op.choices]))
    return masks


def fixed_counts(model: Model, outcome: Outcome, of: Model) -> Bounds:
    """The counts of recomputed blocks of an outcome, as bounds that fix the counts of another model (`of`) to them."""
    bounds: Bounds = {}
    for stage, counts in model.recomputed.items():
        for r, count, q in zip(counts, of.recomputed[stage], of.any_recomputed[stage], strict=True):
            value = float(round(outcome.values[r]))
            bounds = {**bounds, q: (min(value, 1.0),) * 2, count: (value, value)}
    return bounds


def flows_between(model: Model, choices: ChoiceSubset) -> Array:
    """A boolean array over a model's variables: which are flows between these choices."""
    are_flows = np.zeros(len(model.program.names), dtype=bool)
    for flow in model.flows:
        ports = _any(model.costs.ports(flow.tensor).values(), choices[flow.tensor.source])
        wants = _any(model.costs.wanted(flow.tensor, flow.use).values(), choices[flow.use.op])
        flows_kept = flow.numbers[np.ix_(ports, wants)]
        are_flows[flows_kept[flows_kept >= 0]] = True
    return are_flows


def _any(groups: Iterable[Sequence[int]], choices: Array) -> Array:
    return np.array([bool(choices[list(group)].any()) for group in groups])


def _different(places: Array) -> int:
    return int(np.count_nonzero(np.bincount(places)))


def _places(choices: Iterable[Sequence[int]], number: int) -> Array:
    """For each of `number` choices, the index of the list that contains it."""
    places = np.zeros(number, dtype=np.int64)
    for place, group in enumerate(choices):
        places[list(group)] = place
    return places
