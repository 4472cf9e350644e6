"""The cost of converting tensors between layouts: each conversion is paid once by all uses that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost.traffic import gradient_enters
from autopar.layout import Layout
from autopar.solver.linear.terms import Array
from autopar.solver.problem import Tensor
from autopar.solver.seconds.replays import Flow, largest, pay_replays
from autopar.solver.seconds.shares import Shares

if TYPE_CHECKING:
    from autopar.solver.model import Model


@dataclass(frozen=True)
class Paid:
    """Flows of one tensor that share conversions, on the grid of all ports of its source and all wanted layouts.

    `numbers`: the variables of each flow, -1 for none; `forward`, `backward`: seconds by axis, as in `Prices`;
    `regathers`: which ports are parameters that are gathered again; `shares`: as in `Prices`.
    """

    flows: Sequence[Flow]
    numbers: Sequence[Array]
    forward: Array
    backward: Array
    regathers: Array
    shares: Shares | None

    @property
    def costly(self) -> Array:
        """The pairs whose conversion costs something."""
        return (self.forward > 0).any(axis=0) | (self.backward > 0).any(axis=0)


def pay_conversions(model: Model, tensors: Sequence[Tensor]) -> None:
    """Add the flows of the tensors of one source to all uses, and charge their conversions; uses outside segments share
    conversions."""
    sharing = model.costs.shared(tensors)
    flows = [[model.flow(tensor, use) for use in tensor.uses] for tensor in tensors]
    model.flows += [flow for of_tensor in flows for flow in of_tensor]
    whole = _on_one_grid(model, flows)
    for part in _parts(model, whole):
        shared = np.full(part[0].costly.shape, -1)
        for tensor, paid in zip(tensors, part, strict=True):
            if tensor.kind == "each":
                for flow, numbers in zip(paid.flows, paid.numbers, strict=True):
                    at = (numbers >= 0) & paid.costly
                    model.pay_conversion(tensor, numbers[at], paid.forward[:, at], paid.backward[:, at], flow.use.times)
            elif paid.flows and tensor in sharing:
                _pay_shared(model, tensor, paid, shared)
            elif paid.flows:
                at, variables = _any(model, paid)
                count = model.costs.conversions(tensor)
                model.pay_conversion(tensor, variables, paid.forward[:, at], paid.backward[:, at], count)
                shares, uses = paid.shares, len(paid.flows)
                model.latency.add("gathers", tensor, variables, shares, at, paid.forward, uses=uses)
                model.latency.add("reductions", tensor, variables, shares, at, paid.backward, uses=uses)
    for tensor, paid in zip(tensors, whole, strict=True):
        for flow, numbers in zip(paid.flows, paid.numbers, strict=True):
            _pay_regather(model, flow, numbers, paid)
        pay_replays(model, tensor, paid, again=tensor in sharing and tensor.kind in ("outer", "first"))


def _on_one_grid(model: Model, flows: Sequence[list[Flow]]) -> list[Paid]:
    """The flows of one source on the common grid of its ports and all wanted layouts."""
    first = flows[0][0]
    places: dict[Layout, int] = {}
    for of_tensor in flows:
        for flow in of_tensor:
            for layout in flow.wanted:
                places.setdefault(layout, len(places))
    prices = model.costs.table(model.problem.ref(first.tensor)).prices([port for port, _ in first.ports], list(places))
    regathers = np.array([regather for _, regather in first.ports], dtype=bool)
    paid = []
    for of_tensor in flows:
        grids = []
        for flow in of_tensor:
            grid = np.full((len(first.ports), len(places)), -1)
            grid[:, [places[layout] for layout in flow.wanted]] = flow.numbers
            grids.append(grid)
        exists = np.max(grids, axis=0) >= 0
        forward, backward = np.where(exists, prices.forward, 0.0), np.where(exists, prices.backward, 0.0)
        paid.append(Paid(of_tensor, grids, forward, backward, regathers, prices.shares))
    return paid


def _parts(model: Model, whole: Sequence[Paid]) -> list[Sequence[Paid]]:
    """The parts that are paid separately: forward and backward together, or each on its own if some uses return no
    gradient.

    A conversion runs forward if any use needs it, and backward if any use that returns a gradient needs it.
    """
    problem = model.problem
    forward, backward = [], []
    for paid in whole:
        with_gradient = [
            (flow, numbers)
            for flow, numbers in zip(paid.flows, paid.numbers, strict=True)
            if gradient_enters(problem.memory, problem.ops[flow.use.op].node, problem.ref(flow.tensor))
        ]
        flows, grids = [flow for flow, _ in with_gradient], [numbers for _, numbers in with_gradient]
        exists = np.max(grids, axis=0) >= 0 if grids else False
        none = np.zeros_like(paid.forward)
        forward.append(replace(paid, backward=none))
        backward.append(
            replace(paid, flows=flows, numbers=grids, forward=none, backward=np.where(exists, paid.backward, 0.0))
        )
    any_without_gradient = any(len(mine.flows) < len(its.flows) for mine, its in zip(backward, whole, strict=True))
    if not any_without_gradient or not any(paid.backward.any() for paid in whole):
        return [whole]
    return [forward, backward]


def _any(model: Model, paid: Paid) -> tuple[Array, Array]:
    """The pairs that cost something, and for each a variable that is 1 if any use needs the conversion."""
    grids = [np.where(paid.costly, numbers, -1) for numbers in paid.numbers]
    return largest(model.program, grids, "p", upper=1.0)


def _pay_shared(model: Model, tensor: Tensor, paid: Paid, shared: Array) -> None:
    """Charge conversions outside segments once for all readers there; `shared`: the variables made for them so far."""
    at, variables = _any(model, paid)
    new = at & (shared < 0)
    shared[new] = model.program.variables("p", int(new.sum()))
    model.pay_conversion(tensor, shared[new], paid.forward[:, new], paid.backward[:, new], 1.0)
    terms: list[tuple[int, float]] = []
    right = 0.0
    if tensor.kind != "plain" and tensor.stage in model.recomputed:
        if tensor.kind == "outer":  # a block that does not recompute shares it
            terms, right = [(model.kept(tensor.stage), -1.0)], -1.0
        else:  # the first block shares it unless it recomputes (it does if any does)
            terms = [(model.any_recomputed[tensor.stage][-1], 1.0)]
    model.program.implies("p", variables, shared[at], terms, right)


def _pay_regather(model: Model, flow: Flow, numbers: Array, paid: Paid) -> None:
    """Charge a parameter that is gathered again: once for each use that saves it, in blocks that do not recompute."""
    problem = model.problem
    reader = problem.ops[flow.use.op]
    if flow.use.index not in problem.memory.saved(reader.node)[0]:
        return
    at = (numbers >= 0) & paid.regathers[:, None]
    seconds = problem.memory.micro_batches * paid.forward[:, at]
    model.pay_again(flow.tensor, numbers[at], model.costs.conversions(flow.tensor) * seconds)
    model.latency.add("again", flow.tensor, numbers[at], paid.shares, at, paid.forward)
