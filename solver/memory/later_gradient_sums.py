"""Gradients of parameters that several ops read in different layouts, as `cost.memory.gradient_sums` has them.

The sum of a layout begins, in backward, at the last op v that reads the parameter so, and is reduced after the first
one. Rows count the first reader of backward apart (`solver.memory.rows`). For each other one, G bounds the bytes b(f)
of its flows f to any layout w, unless a reader u behind it has begun the sum already; most_w is the most of these::

    G >= sum of b(f) f over flows f to w - most_w * sum of all flows of readers u to w        for every w

P is the part of s bytes that such an op adds to a sum begun behind it::

    P >= s * (sum of flows to w + sum of flows of a reader u to w - 1)                        for every w and u

H is a flow of a region that is not the first to read the parameter, unless an op before reads it alike: then its bucket
is reduced after that region::

    H >= f - sum of all flows of readers before to w
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.transfer_bytes import TransferBytes
from autopar.cost.traffic import in_segment
from autopar.layout import Layout
from autopar.solver.memory.stage_bytes import UNIT, add
from autopar.solver.seconds.replays import Expression, Flow

if TYPE_CHECKING:
    from autopar.solver.memory.rows import Rows

Seen = Mapping[Layout, Sequence[Sequence[int]]]  # by layout, the flows of each other reader


class LaterGradientSums:
    """Of a model's parameters; `rows`: its memory rows."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.program, self.problem, self.memory = rows, rows.program, rows.problem, rows.memory
        self._first: dict[int, int] = {}  # H by flow
        by_parameter: dict[int, list[Flow]] = {}
        for (source, reader), flows in rows.flows.items():
            node = self.problem.ops[source].node
            if self.memory.is_trainable(node) and in_segment(self.problem.ops[reader].node):
                by_parameter.setdefault(source, []).extend(flows)
        position = self.memory.lifetimes.position
        self._reads = {
            source: sorted(flows, key=lambda flow: position[self.problem.ops[flow.use.op].node])
            for source, flows in by_parameter.items()
            if len(flows) > 1
        }

    def add_gradients(self) -> None:
        """Add the sums of gradients that begin behind the first reader of backward."""
        for source, flows in self._reads.items():
            for flow, seen in _others(flows[::-1]):
                self._add(source, flow, seen)

    def _add(self, source: int, flow: Flow, seen: Seen) -> None:
        rows, op, reader = self.rows, self.problem.ops[source], flow.use.op
        shared, accumulates = self.problem.grouping.shared(op.node), self.memory.micro_batches > 1
        transfers = rows.reads.transfers([flow], self.problem.grouping)
        both = [(self.memory.lifetimes.waiting(op.node, transfer), variable) for transfer, variable in transfers]
        for target, place in ((rows.waiting, 0), (rows.cast, 1)):
            of_reader = target.setdefault(reader, {})
            for term, size in self._beyond(flow, {v: sizes[place] for sizes, v in both}, seen).items():
                add(of_reader, term, size)
        stage = self.problem.ops[reader].stage
        if self.problem.stages[stage].count == 1 and self._adds(source, flow):
            for term, size in self._first_parts(flow, seen).items():
                add(rows.cast[reader], term, size)
        if stage != op.stage and self.problem.stages[stage].count > 1 and not accumulates:
            for term, size in self._beyond(flow, {v: t.waiting for t, v in transfers}, seen).items():
                add(rows.shared.setdefault(reader, {}), term, size)
        later = {v: max(t.waiting, t.reduced) if shared else t.reduced for t, v in transfers}
        gradients, count = rows.stages[stage].gradients, self.rows.model.costs.count(op)
        if accumulates and shared:
            left = {v: later[v] for t, v in transfers if not t.reduction}
            for term, size in self._beyond(flow, left, seen).items():
                add(left_by(rows, stage), term, count * size)
        for term, size in self._beyond(flow, later, seen).items():
            if stage == op.stage:
                add(gradients.of_block, term, size)
            else:
                add(gradients.shared, term, count * size)

    def _adds(self, source: int, flow: Flow) -> bool:
        """Whether a point of a flow's op counts the part that it adds to a gradient."""
        points = self.memory.lifetimes.points(self.problem.ops[flow.use.op].node)
        made = (ref for p in points if p.backward for _, ref in self.memory.lifetimes.gradients_made(p))
        return any(self.problem.op_of[ref.node] == source for ref in made)

    def _first_parts(self, flow: Flow, seen: Seen) -> Expression:
        """Less the part of a gradient that an op makes, as it is in the sum that begins with it; plus P."""
        ref, terms = self.problem.ref(flow.tensor), Expression()
        by_layout: dict[Layout, list[int]] = {}
        for (_, wanted), variable in flow.pairs.items():
            add(terms, variable, -self.memory.local_bytes(ref, wanted))
            if wanted in seen:
                by_layout.setdefault(wanted, []).append(variable)
        if by_layout:
            part = self.program.variable("part", upper=None, whole=False)
            for wanted, variables in by_layout.items():
                size = self.memory.local_bytes(ref, wanted) / UNIT
                for others in seen[wanted]:
                    row = {part: 1.0, **dict.fromkeys((*variables, *others), -size)}
                    self.program.at_least("part", row, -size)
            terms[part] = UNIT
        return terms

    def _beyond(self, flow: Flow, sizes: Mapping[int, int], seen: Seen) -> Expression:
        """The bytes by a flow's variables, with G in place of those to layouts of other readers."""
        terms: Expression = {}
        by_layout: dict[Layout, Expression] = {}
        for (_, wanted), variable in flow.pairs.items():
            if size := sizes.get(variable, 0):
                add(by_layout.setdefault(wanted, {}) if wanted in seen else terms, variable, size / UNIT)
        if by_layout:
            largest = self.program.variable("gradient sum", upper=None, whole=False)
            for wanted, of_layout in by_layout.items():
                most, less = max(of_layout.values()), itertools.chain.from_iterable(seen[wanted])
                row = {largest: 1.0, **{v: -size for v, size in of_layout.items()}}
                self.program.at_least("gradient sum", row | dict.fromkeys(less, most), 0.0)
            terms[largest] = 1.0
        return {variable: size * UNIT for variable, size in terms.items()}

    def reduced(self, stage: int, grouping: Grouping) -> list[list[tuple[TransferBytes, int]]]:
        """The reads of parameters whose gradients are reduced after a stage's backward though a region before reads the
        parameter too."""
        reads, inside = [], set(self.problem.stages[stage].ops)
        for source, flows in self._reads.items():
            if not self.problem.grouping.shared(self.problem.ops[source].node):
                continue
            home = self.problem.grouping.home(self.problem.ops[source].node)
            for flow, seen in _others(flows):
                region = self.problem.grouping.region(self.problem.ops[flow.use.op].node)
                if flow.use.op in inside and region != home:
                    wanted = {variable: layout for (_, layout), variable in flow.pairs.items()}
                    transfers = [pair for pair in self.rows.reads.transfers([flow], grouping) if pair[0].reduction]
                    reads.append([(t, self._first_so(v, seen.get(wanted[v], ()))) for t, v in transfers])
        return reads

    def _first_so(self, variable: int, before: Sequence[Sequence[int]]) -> int:
        """H of a flow: itself where no op before can read the parameter alike."""
        if before and variable not in self._first:
            first = self._first[variable] = self.program.variable("first so", whole=False)
            self.program.at_least(
                "first so",
                [(first, 1.0), (variable, -1.0), *((v, 1.0) for of_reader in before for v in of_reader)],
                0.0,
            )
        return self._first.get(variable, variable)


def left_by(rows: Rows, stage: int) -> Expression:
    """Where to add gradients, as stored, of several regions' parameters, that several micro-batches leave when a stage
    has run backward."""
    return rows.accumulated if rows.problem.stages[stage].count > 1 else rows.left.setdefault(stage, {})


def _others(flows: Sequence[Flow]) -> Iterator[tuple[Flow, Seen]]:
    """All flows but the first, each with those before it by layout."""
    seen: dict[Layout, list[list[int]]] = {}
    for number, flow in enumerate(flows):
        if number:
            yield flow, seen
        own: dict[Layout, list[int]] = {}
        for (_, wanted), variable in flow.pairs.items():
            own.setdefault(wanted, []).append(variable)
        for wanted, variables in own.items():
            seen.setdefault(wanted, []).append(variables)
