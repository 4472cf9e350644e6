"""Bytes that live only at one point of an op, as `cost.memory.momentary` has them: sums over choices and flows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.momentary import (
    apart_bytes,
    awaited_bytes,
    not_while_converting_bytes,
    own_bytes,
    reads_another_than_kept,
    slices_beside,
)
from autopar.cost.memory.point import Point, Read
from autopar.graph import TensorRef, is_cast_input
from autopar.layout import Layout
from autopar.solver.linear.terms import Array, Linear
from autopar.solver.memory.stage_bytes import UNIT, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow, largest
from autopar.strategies.strategy import Strategy

_FEW = 2  # terms: a longer sum becomes a variable of its own, which all points that have the sum share
BytesOf = Callable[[StepMemory, TensorRef, Layout, Layout], int]


class Alive:
    """What lives at the points of a model's ops, as expressions of its variables.

    `into`: by op, the flows into it, grouped by the tensor read, without those of parameters. `reads`: flows by the op
    that makes the tensor, the output's number and the reader, with or without the number of the reader's input."""

    def __init__(self, model: Model) -> None:
        self.model, self.problem = model, model.problem
        self.memory, self.lifetimes = model.problem.memory, model.problem.memory.lifetimes
        self._conversions: dict[tuple[Flow, bool, bool, bool], int | None] = {}
        self._sums: dict[frozenset[tuple[int, float]], int] = {}
        self._flow_bytes: dict[tuple[Flow, BytesOf], Expression] = {}
        self._aparts: dict[tuple[Flow, Flow], int] = {}
        self._stagings: dict[tuple[object, ...], int | None] = {}
        self.into: dict[int, list[list[Flow]]] = {}
        self.reads: dict[tuple[int, ...], Flow] = {}
        for flow in reversed(model.flows):  # of several flows of a key, the first stands for all
            key = flow.tensor.source, flow.tensor.output, flow.use.op
            self.reads[key] = self.reads[(*key, flow.use.index)] = flow
        for flows in self._by_reader():
            self.into.setdefault(flows[0].use.op, []).append(flows)

    def _by_reader(self) -> Iterable[list[Flow]]:
        """Lists of the flows of one tensor to one op; none for parameters."""
        by_reader: dict[tuple[int, int, str, int], list[Flow]] = {}
        for flow in self.model.flows:
            tensor = flow.tensor
            if not self.memory.is_parameter(self.problem.ops[tensor.source].node):
                by_reader.setdefault((tensor.source, tensor.output, tensor.kind, flow.use.op), []).append(flow)
        return by_reader.values()

    def _read(self, member: int, kind: str) -> Iterable[list[Flow]]:
        """The flows into an op of a stage's first block (`kind` "first"), or of a later one ("next"), which reads the
        block before it where the first reads other stages."""
        for flows in self.into.get(member, ()):
            if flows[0].tensor.kind not in ("first", "next") or flows[0].tensor.kind == kind:
                yield flows

    def at(self, member: int, point: Point, kind: str) -> Expression:
        """All bytes that live only at this point."""
        terms: Expression = {}
        for variable, choice in zip(self.model.x[member], self.problem.ops[member].choices, strict=True):
            add(terms, variable, own_bytes(self.lifetimes, point, choice.strategy))
        for variable, size in self.passing(point).items():
            add(terms, variable, size)
        for flows in self._read(member, kind):
            converted = self._converted(flows, point)
            if converted is not None:
                add(terms, converted, UNIT)
        staged = self._staged(member, point, kind)
        if staged is not None:
            add(terms, staged, UNIT)
        return terms

    def converts(self, member: int, point: Point, kind: str) -> bool:
        """Whether conversions of what the op reads take bytes at a point."""
        converted = (self._converted(flows, point) for flows in self._read(member, kind))
        return any(variable is not None for variable in converted) or self._staged(member, point, kind) is not None

    def given(self, member: int, point: Point, kind: str) -> Expression:
        """The inputs that no op before this one keeps: bytes of each in its maker's layout and in the wanted one."""
        terms: Expression = {}
        unsaved = self.lifetimes.unsaved(point.node)
        for flow in (flow for flows in self._read(member, kind) for flow in flows):
            if flow.use.index in unsaved:
                ref = self.problem.ref(flow.tensor)
                for ((layout, _), wanted), variable in flow.pairs.items():
                    layouts = (wanted,) if is_cast_input(ref.node) else (layout, wanted)
                    copies = {self.memory.copy(ref, read_as) for read_as in layouts}
                    add(terms, variable, flow.use.times * sum(map(self.memory.copy_bytes, copies)))
        return terms

    def passing(self, point: Point) -> Expression:
        """Values or gradients of other tensors that live at a point, and in backward the gradients of the op's
        outputs."""
        terms: Expression = {}
        for ref in point.passing:
            self._add_as_made(terms, ref)
        for read in point.awaited if not self.model.bare else ():
            self._add_sum(terms, "awaited", self._by_flow(read, awaited_bytes))
        for reads in point.apart if not self.model.bare else ():
            self._add_sum(terms, "apart", self._apart(*reads))
        return terms

    def _add_sum(self, target: Expression, name: str, terms: Expression) -> None:
        """Add a sum that several points may have: as a shared variable, unless it has few terms."""
        if len(terms) > _FEW:
            key = frozenset(terms.items())
            if key not in self._sums:
                self._sums[key] = self.model.program.variable(name, upper=None, whole=False)
                bytes_ = [(v, c / UNIT) for v, c in terms.items()]
                self.model.program.equal(name, [(self._sums[key], -1.0), *bytes_], 0.0)
            terms = {self._sums[key]: UNIT}
        for variable, size in terms.items():
            add(target, variable, size)

    def _by_flow(self, read: Read, bytes_of: BytesOf) -> Expression:
        """`bytes_of` a read as a sum over the flows that it can take."""
        key = self._flow(read), bytes_of
        if key not in self._flow_bytes:
            sizes = self._flow_bytes[key] = {}
            for ((layout, _), wanted), variable in key[0].pairs.items():
                add(sizes, variable, bytes_of(self.memory, read.tensor, layout, wanted))
        return self._flow_bytes[key]

    def _apart(self, read: Read, next_read: Read | None = None) -> Expression:
        """A gradient that is a tensor of its own, where it would share another's storage, because this read converts
        it; not counted yet where the `next_read` wants the same layout and may share the conversion."""
        terms = self._by_flow(read, apart_bytes)
        if next_read is None or not terms:
            return terms
        flow, next_flow = self._flow(read), self._flow(next_read)
        if (flow, next_flow) not in self._aparts:
            apart = self._aparts[flow, next_flow] = self.model.program.variable("apart", upper=None, whole=False)
            alike: dict[Layout, list[int]] = {}
            for (_, wanted), variable in next_flow.pairs.items():
                alike.setdefault(wanted, []).append(variable)
            for wanted in flow.wanted:
                sizes = {v: terms[v] / UNIT for (_, layout), v in flow.pairs.items() if layout == wanted and v in terms}
                if sizes:
                    less = [(v, max(sizes.values())) for v in alike.get(wanted, ())]
                    row = [(apart, 1.0), *((v, -size) for v, size in sizes.items()), *less]
                    self.model.program.at_least("apart", row, 0.0)
        return {self._aparts[flow, next_flow]: UNIT}

    def _flow(self, read: Read) -> Flow:
        """The flow that stands for a read."""
        (maker, output), (reader, place) = read
        key = self.problem.op_of[maker], output, self.problem.op_of[reader]
        flow = self.reads.get((*key, place))
        return flow if flow is not None else self.reads[key]

    def _add_as_made(self, target: Expression, ref: TensorRef) -> None:
        """Add the bytes of a tensor in the layouts of its maker's choices."""
        source = self.problem.op_of[ref.node]
        for variable, choice in zip(self.model.x[source], self.problem.ops[source].choices, strict=True):
            add(target, variable, self.memory.local_bytes(ref, choice.strategy.outputs[ref.index]))

    def _staged(self, member: int, point: Point, kind: str) -> int | None:
        """What the largest conversion stages for its collectives, beyond those bytes of the point that are not there
        meanwhile (`cost.memory.momentary`): a variable in MiB, or None where it is 0."""
        missing = tuple(self._missing(point, choice.strategy) for choice in self.problem.ops[member].choices)
        others = [ref for ref in point.over if ref.node is not point.node]
        over = tuple((self.problem.op_of[ref.node], ref.index) for ref in others)
        crosses = any(flows[0].tensor.kind in ("first", "next") for flows in self.into.get(member, ()))
        key = member, point.backward, missing, over, kind if crosses else ""
        if key not in self._stagings:
            gone: Expression = {}
            for ref in others:
                self._add_as_made(gone, ref)
            staged, program = None, self.model.program
            for flow in (flow for flows in self._read(member, kind) for flow in flows):
                terms = self._staged_by(flow, np.array(missing), backward=point.backward)
                if terms is None:
                    continue
                staged = program.variable("staged", upper=None, whole=False) if staged is None else staged
                for variable, size in gone.items():
                    terms.add(variable, -size / UNIT)
                variables, sizes = terms.terms()
                program.entries.add(program.at_least("staged", [(staged, 1.0)], 0.0), variables, -sizes)
            self._stagings[key] = staged
        return self._stagings[key]

    def _staged_by(self, flow: Flow, missing: Array, *, backward: bool) -> Linear | None:
        """What a conversion stages, less the bytes `missing` meanwhile by the op's choices: at most 0 where these are
        more, and None where they always are.

        The least that is missing with all choices that want one layout is subtracted from the flows to that layout, so
        that few terms are left.
        """
        table = self.model.costs.table(self.problem.ref(flow.tensor))
        if backward and not table.needs_grad:
            return None
        ports = [layout for layout, _ in flow.ports]
        sizes = table.staged_bytes(ports, flow.wanted, backward=backward)
        if backward:  # slices of gradients
            another = table.makes_another(ports, flow.wanted, backward=True) & (_collectives(flow, backward=True) == 0)
            sizes = np.maximum(sizes, np.where(another, self._sizes(flow)[:, None] * UNIT, 0))
        wants = [np.array(choices) for choices in self.model.costs.wanted(flow.tensor, flow.use).values()]
        least = np.array([missing[choices].min() for choices in wants])
        at = (flow.numbers >= 0) & (sizes > least)
        if not at.any():
            return None
        terms = Linear()
        terms.add(flow.numbers[at], (sizes - least)[at] / UNIT)
        for column in np.flatnonzero(at.any(axis=0)):
            for i in wants[column]:
                terms.add(self.model.x[flow.use.op][i], (least[column] - missing[i]) / UNIT)
        return terms

    def _missing(self, point: Point, strategy: Strategy) -> int:
        """The op's own bytes at a point that are not there while its inputs are converted, with gradients of
        results."""
        own = (ref for ref in point.over if ref.node is point.node)
        gradients = sum(self.memory.local_bytes(ref, strategy.outputs[ref.index]) for ref in own)
        return not_while_converting_bytes(self.lifetimes, point, strategy) + gradients

    def _converted(self, flows: Sequence[Flow], point: Point) -> int | None:
        """`conversion_bytes` of one tensor that an op reads, as a variable in MiB; None where it is 0."""
        ref, forward = self.problem.ref(flows[0].tensor), not point.backward
        slices = forward and slices_beside(self.memory, point.node, ref)
        makes_copy = forward and reads_another_than_kept(self.memory, point.node, ref)
        key = flows[0], point.backward, slices, makes_copy
        if key not in self._conversions:
            converting = [self._counts(flow, slices or makes_copy, backward=point.backward) for flow in flows]
            variable = None
            if any((converts & (flow.numbers >= 0)).any() for converts, flow in zip(converting, flows, strict=True)):
                of_each = flows[0].tensor.kind == "each"  # a tensor of every block, each converted by itself
                if makes_copy or of_each:
                    terms, read = Linear(), self._converted_copy if makes_copy else self._one_read
                    for flow, converts in zip(flows, converting, strict=True):
                        terms.add(*read(flow, converts).terms(flow.use.times if of_each else 1))
                elif len(flows) == 1:
                    terms = self._one_read(flows[0], converting[0])
                else:
                    terms = self._several(flows, converting)
                variable = self.model.program.variable("converted", upper=None, whole=False)
                self.model.program.equal_to_sum("converted", variable, terms.terms())
            self._conversions[key] = variable
        return self._conversions[key]

    def _converted_copy(self, flow: Flow, converts: Array) -> Linear:
        """The bytes of what a conversion makes, by its flows."""
        terms, ref, at = Linear(), self.problem.ref(flow.tensor), (flow.numbers >= 0) & converts
        sizes = np.array([self.memory.local_bytes(ref, layout) for layout in flow.wanted]) / UNIT
        terms.add(flow.numbers[at], np.broadcast_to(sizes[None, :], at.shape)[at])
        return terms

    def _one_read(self, flow: Flow, converts: Array) -> Linear:
        """The tensor's bytes by its maker's choices, less those of flows that convert nothing: of these there are fewer
        than of flows that convert."""
        terms, sizes = Linear(), self._sizes(flow)
        for size, choices in zip(sizes, self.model.ends(flow.tensor).values(), strict=True):
            for variable in choices:
                terms.add(variable, size)
        unconverted = (flow.numbers >= 0) & ~converts
        terms.add(flow.numbers[unconverted], -np.broadcast_to(sizes[:, None], unconverted.shape)[unconverted])
        return terms

    def _several(self, flows: Sequence[Flow], converting: Sequence[Array]) -> Linear:
        """Of an op that reads a tensor several times (x * x): reads that want one layout share a conversion."""
        places = {layout: i for i, layout in enumerate(dict.fromkeys(w for flow in flows for w in flow.wanted))}
        grids = []
        for flow, converts in zip(flows, converting, strict=True):
            grid = np.full((len(flow.ports), len(places)), -1)
            grid[:, [places[layout] for layout in flow.wanted]] = np.where(converts, flow.numbers, -1)
            grids.append(grid)
        at, variables = largest(self.model.program, grids)
        terms = Linear()
        terms.add(variables, np.broadcast_to(self._sizes(flows[0])[:, None], at.shape)[at])
        return terms

    def _counts(self, flow: Flow, slices: bool, *, backward: bool) -> Array:
        """Whether a conversion's source counts beside its result, by the layouts of both: where collectives run and,
        with `slices`, where it only cuts a slice."""
        if slices:
            table = self.model.costs.table(self.problem.ref(flow.tensor))
            return table.makes_another([layout for layout, _ in flow.ports], flow.wanted, backward=backward)
        return _collectives(flow, backward=backward) > 0

    def _sizes(self, flow: Flow) -> Array:
        """MiB of the tensor in each of the layouts that its source has."""
        ref = self.problem.ref(flow.tensor)
        return np.array([self.memory.local_bytes(ref, layout) for layout, _ in flow.ports]) / UNIT


def _collectives(flow: Flow, *, backward: bool) -> Array:
    return flow.prices.backward_collectives if backward else flow.prices.forward_collectives
