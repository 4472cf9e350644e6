"""Counts of recomputed blocks times choices and flows, exactly, and what replays pay for conversions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.layout import Layout
from autopar.solver.prices import Price
from autopar.solver.problem import Tensor, Use
from autopar.solver.program import Program

if TYPE_CHECKING:
    from autopar.solver.model import Model

Port = tuple[Layout, bool]  # how a tensor lies at its source, and whether it is a parameter gathered again
Pair = tuple[Port, Layout]
Expression = dict[int, float]


@dataclass
class Flow:
    """The flows of one tensor to one use."""

    tensor: Tensor
    use: Use
    pairs: dict[Pair, int]


def counted(program: Program, ones: Sequence[Sequence[int]], times: Mapping[int, float], most: int) -> list[int]:
    """Variables equal to `times` (an expression, a count up to `most`) times each sum of `ones`, which are one-hot."""
    found = [program.variable("count", upper=float(most)) for _ in ones]
    for variable, one in zip(found, ones, strict=True):
        program.multiple("count", variable, one, times, float(most))
    program.equal("counts", [(v, 1.0) for v in found] + [(v, -c) for v, c in times.items()], 0.0)
    return found


def replays(model: Model, flow: Flow, groups: Sequence[Sequence[Pair]]) -> list[int]:
    """How many recomputed blocks have a flow of each group of pairs: r f (q f, (r - q) f at a stage's border)."""
    stage, kind = flow.tensor.stage, flow.tensor.kind
    r, q = model.recomputed[stage], model.any_recomputed[stage]
    times = {q: 1.0} if kind == "first" else {r: 1.0, q: -1.0} if kind == "next" else {r: 1.0}
    most = 1 if kind == "first" else max(1, model.conversions(flow.tensor))
    apart = {pair for group in groups for pair in group}
    rest = [variable for pair, variable in flow.pairs.items() if pair not in apart]
    ones = [[flow.pairs[pair] for pair in group] for group in groups]
    return counted(model.program, [*ones, rest] if rest else ones, times, most)[: len(groups)]


def pay_replays(
    model: Model, tensor: Tensor, flows: Sequence[Flow], prices: Mapping[Pair, Price], *, again: bool
) -> None:
    """Conversions that replays repeat, and (`again`) those that recomputed blocks do not share outside.

    A recomputed block gathers parameters in its replay and not again.
    """
    if tensor.kind in ("plain", "each") or tensor.stage not in model.recomputed:
        return
    many = model.problem.memory.micro_batches
    repeated: dict[Pair, list[int]] = {}
    fresh: dict[Pair, list[int]] = {}
    for flow in flows:
        op = model.problem.ops[flow.use.op]
        drops = flow.use.index in model.problem.memory.saved(op.node)[0]  # its regathers, if it has any
        wanted = [
            pair
            for pair in flow.pairs
            if pair in prices and (again or (prices[pair].forward and (op.replayed or (pair[0][1] and drops))))
        ]
        if not wanted:
            continue
        if len(flows) == 1 and not again:
            _pay_by_price(model, flow, wanted, prices, replayed=op.replayed, drops=drops)
            continue
        for pair, variable in zip(wanted, replays(model, flow, [[pair] for pair in wanted]), strict=True):
            if pair[0][1] and drops:
                model.pay_again(tensor, variable, -many * prices[pair].forward)
            if op.replayed:
                repeated.setdefault(pair, []).append(variable)
            if again:
                fresh.setdefault(pair, []).append(variable)
    for pair, variables in repeated.items():
        model.pay_again(tensor, largest_of(model.program, variables), many * prices[pair].forward)
    for pair, variables in fresh.items():
        model.pay_conversion(tensor, largest_of(model.program, variables), prices[pair], 1.0)


def _pay_by_price(
    model: Model, flow: Flow, wanted: Iterable[Pair], prices: Mapping[Pair, Price], *, replayed: bool, drops: bool
) -> None:
    """Replays of a tensor with one use: pairs of equal price share a count."""
    groups: dict[float, list[Pair]] = {}
    for pair in wanted:
        times = replayed - (pair[0][1] and drops)
        if times:
            seconds = float(f"{times * prices[pair].forward:.12g}")  # equal but for the order of their sums
            groups.setdefault(seconds, []).append(pair)
    if groups:
        counts = replays(model, flow, list(groups.values()))
        for seconds, variable in zip(groups, counts, strict=True):
            model.pay_again(flow.tensor, variable, model.problem.memory.micro_batches * seconds)


def largest_of(program: Program, variables: Sequence[int]) -> int:
    """A variable that is at least each of some others."""
    if len(variables) == 1:
        return variables[0]
    found = program.variable("most", upper=None)
    for variable in variables:
        program.implies("most", variable, found)
    return found
