"""Products of counts of recomputed blocks with choices and flows, and the conversions that replays repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autopar.layout import Layout
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array
from autopar.solver.problem import Tensor, Use
from autopar.solver.seconds.costs import Port
from autopar.solver.seconds.prices import Prices

if TYPE_CHECKING:
    from autopar.solver.model import Model
    from autopar.solver.seconds.conversions import Paid

Pair = tuple[Port, Layout]
Expression = dict[int, float]


@dataclass(frozen=True, eq=False)
class Flow:
    """The flows of one tensor to one use: variables `numbers[port, wanted]`, -1 for impossible pairs, and prices."""

    tensor: Tensor
    use: Use
    ports: Sequence[Port]
    wanted: Sequence[Layout]
    numbers: Array
    prices: Prices

    @cached_property
    def all(self) -> Array:
        """All variables of the flows."""
        return self.numbers[self.numbers >= 0]

    @cached_property
    def pairs(self) -> dict[Pair, int]:
        """The variables by port and wanted layout."""
        return {
            (port, layout): number
            for port, row in zip(self.ports, self.numbers.tolist(), strict=True)
            for layout, number in zip(self.wanted, row, strict=True)
            if number >= 0
        }


def counted(program: Program, ones: Sequence[Array | Sequence[int]], times: Mapping[int, float], most: int) -> Array:
    """Variables equal to `times` (an expression in counts, at most `most`) times each sum of `ones`; exactly one of all
    `ones` together is 1, so the variables also sum up to `times`."""
    ones = [np.asarray(variables) for variables in ones]
    return program.shared_columns(("counted", *times.items(), most), ones, lambda: _counted(program, ones, times, most))


def _counted(program: Program, ones: Sequence[Array], times: Mapping[int, float], most: int) -> Array:
    products = program.variables("count", len(ones), upper=float(most))
    program.multiple("count", products, ones, times, float(most))
    row = program.equal("counts", [(v, -c) for v, c in times.items()], 0.0)
    program.entries.add(row, products, 1.0)
    return products


def replays(model: Model, flow: Flow, groups: Sequence[Array], level: int) -> Array:
    """Variables: for each group of flows, the number of blocks with a flow f of the group that recompute at this level
    or a higher one. This is r f; for tensors that cross a stage's border it is q f (first block) or (r - q) f (next
    blocks)."""
    stage, kind = flow.tensor.stage, flow.tensor.kind
    r, q = model.recomputed[stage][level - 1], model.any_recomputed[stage][level - 1]
    times = {q: 1.0} if kind == "first" else {r: 1.0, q: -1.0} if kind == "next" else {r: 1.0}
    most = 1 if kind == "first" else max(1, model.costs.conversions(flow.tensor))
    others = np.setdiff1d(flow.all, np.concatenate(groups))
    return counted(model.program, [*groups, others] if len(others) else groups, times, most)[: len(groups)]


class OwnLevel:
    """In a stage of a single block: products of variables with whether the block is exactly at a level (0 or 1)."""

    def __init__(self, model: Model, stage: int) -> None:
        self.model, self.recomputed = model, model.recomputed[stage]
        ops = model.problem.stages[stage].ops
        self.choices = {variable: (number, i) for number in ops for i, variable in enumerate(model.x[number])}
        self.others: dict[tuple[int, int, bool], int] = {}

    def __call__(self, level: int, variable: int, sign: float) -> Expression:
        """The product as an expression: exact for a choice. Any other variable must be bounded from below only; its
        product is bounded from below if it is added (`sign` > 0) and from above if it is subtracted."""
        if variable in self.choices:
            number, i = self.choices[variable]
            at_level, above = (int(self.model.z(number, level_variable)[i]) for level_variable in (level, level + 1))
            return {at_level: 1.0, above: -1.0}
        key = level, variable, sign > 0
        if key not in self.others:
            program, at = self.model.program, [(self.recomputed[level - 1], -1.0), (self.recomputed[level], 1.0)]
            level_variable = self.others[key] = program.variable("at level", whole=False)
            if sign > 0:
                program.at_least("at level", [(level_variable, 1.0), (variable, -1.0), *at], -1.0)
            else:
                program.at_most("at level", [(level_variable, 1.0), (variable, -1.0)], 0.0)
                program.at_most("at level", [(level_variable, 1.0), *at], 0.0)
        return {self.others[key]: 1.0}


def replay_level(model: Model, flow: Flow) -> int:
    """The lowest level at which replays convert a tensor for one use; 0 if none does.

    Segments receive tensors from outside in converted form, except parameters.
    """
    problem = model.problem
    again, ref = problem.ops[flow.use.op].again, problem.ref(flow.tensor)
    if not again.replayed or (problem.memory.is_parameter(ref.node) and flow.tensor.kind == "inner"):
        return again.replayed
    return max(again.replayed, problem.together(ref, flow.use.op))


def pay_replays(model: Model, tensor: Tensor, paid: Paid, *, again: bool) -> None:
    """Charge the conversions that replays repeat, and (`again`) those that recomputed blocks cannot share with readers
    outside.

    A recomputed block gathers a parameter in its replay instead of once more for backward.
    """
    if tensor.kind in ("plain", "each") or tensor.stage not in model.recomputed:
        return
    micro_batches = model.problem.memory.micro_batches
    repeated: list[Array] = []
    fresh: list[Array] = []
    for flow, numbers in zip(paid.flows, paid.numbers, strict=True):
        op, level = model.problem.ops[flow.use.op], replay_level(model, flow)
        drops = flow.use.index in model.problem.memory.saved(op.node)[0]  # it would be regathered, if at all
        dropped = paid.regathers[:, None] & drops
        repeats = (numbers >= 0) & paid.costly
        if not again:
            repeats &= (paid.forward > 0).any(axis=0) & (bool(level) | dropped)
        if not repeats.any():
            continue
        if len(paid.flows) == 1 and not again:
            _pay_by_price(model, flow, numbers, paid.forward * (1.0 * bool(level) - dropped), repeats, level)
            continue
        counts = np.full(numbers.shape, -1)
        counts[repeats] = replays(model, flow, list(numbers[repeats][:, None]), level or model.depth(tensor.stage))
        dropped_repeats = repeats & dropped
        model.pay_again(tensor, counts[dropped_repeats], -micro_batches * paid.forward[:, dropped_repeats])
        if level:
            repeated.append(counts)
        if again:
            fresh.append(counts)
    if repeated:
        at, variables = largest(model.program, repeated)
        model.pay_again(tensor, variables, micro_batches * paid.forward[:, at])
    if fresh:
        at, variables = largest(model.program, fresh)
        model.pay_conversion(tensor, variables, paid.forward[:, at], paid.backward[:, at], 1.0)


def _pay_by_price(model: Model, flow: Flow, numbers: Array, seconds: Array, repeats: Array, level: int) -> None:
    """Charge the replays of a tensor with one use; pairs of equal prices share one count variable."""
    repeats = repeats & (seconds != 0).any(axis=0)
    if not repeats.any():
        return
    order = np.lexsort(seconds[:, repeats])
    each, variables = seconds[:, repeats][:, order], numbers[repeats][order]
    new = (np.abs(np.diff(each)) > 1e-12 * np.abs(each[:, 1:])).any(axis=0)  # equal but for rounding of sums
    starts = np.concatenate([[0], np.flatnonzero(new) + 1])
    counts = replays(model, flow, np.split(variables, starts[1:]), level)
    model.pay_again(flow.tensor, counts, model.problem.memory.micro_batches * each[:, starts])


def largest(
    program: Program, grids: Sequence[Array], name: str = "most", *, upper: float | None = None
) -> tuple[Array, Array]:
    """For grids of variables (-1 for none): at which places any grid has one, and there a variable that is at least
    each of these."""
    bounds = program.shared_columns((name, upper), grids, lambda: _largest(program, grids, name, upper))
    return bounds >= 0, bounds[bounds >= 0]


def _largest(program: Program, grids: Sequence[Array], name: str, upper: float | None) -> Array:
    number = sum((grid >= 0).astype(np.int64) for grid in grids)
    bounds = np.max(grids, axis=0)
    shared = number > 1
    bounds[shared] = program.variables(name, int(shared.sum()), upper=upper)
    for grid in grids:
        at = shared & (grid >= 0)
        program.implies(name, grid[at], bounds[at])
    return bounds
