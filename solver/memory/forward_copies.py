"""Copies of parameters that a forward reads, as expressions: `solver.memory.forward_rows` adds them up.

A copy counts with the op that is the first to read it so::

    fresh[u,l,w] >= f[u,l,w] - sum of f[t,l,w] over readers t before u

and in regions behind that one, until its last reader, where it is read in both::

    stays[l,w] >= f[t,l,w] + f[u,l,w] - 1       for all readers t before and u to come

In the forward of a training step, what an op keeps for backward stays until the end of its region, and then counts
among what the regions before keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.moving import Moving, moving
from autopar.solver.memory.stage_bytes import BucketBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow, Pair


class Read(NamedTuple):
    """An op that reads a parameter, ops that have read it before, and its last reader in this region, if it is that of
    all: all by their numbers."""

    op: int
    parameter: int
    before: tuple[int, ...]
    last: int | None


class Stay(NamedTuple):
    """A parameter between ops that have read it in regions before, and those that are yet to."""

    parameter: int
    before: tuple[int, ...]
    later: tuple[int, ...]


class ForwardCopies:
    """Of a model; `flows`: by the op that is read and the op that reads it, both of one block; `memory`, `grouping`: of
    a pass without backward over its graph."""

    def __init__(
        self,
        model: Model,
        flows: Mapping[tuple[int, int], list[Flow]],
        total: BucketBytes,
        memory: StepMemory,
        grouping: Grouping,
    ) -> None:
        self.problem, self.program, self.flows, self.total = model.problem, model.program, flows, total
        self.memory, self.grouping = memory, grouping
        self._fresh: dict[Read, list[tuple[int, Moving, bool]]] = {}
        self._kept = {parameter for (parameter, _), some in flows.items() if any(map(self._keeps, some))}
        self._stays: dict[Stay, Expression] = {}
        self._sums: dict[tuple[str, tuple[Read, ...]], int | None] = {}

    def copies(self, read: Read, *, moves: bool, leave: bool = False) -> Expression:
        """Bytes of what an op is the first to read, either of what moves or of what is converted there; `leave`: but
        for what may be kept when the last op has read it."""
        found: Expression = {}
        for variable, one, kept in self._fresh_of(read):
            if moves == (one.arriving > 0) and not (leave and kept):
                add(found, variable, one.copied)
        return found

    def moves(self, reads: Sequence[Read]) -> bool:
        """Whether anything is made for what some ops are the first to read."""
        return any(self._fresh_of(read) for read in reads)

    def staying(self, stay: Stay) -> Expression:
        """Bytes of a parameter's copies that ops have read, and others, or the same ones of other blocks, will."""
        if stay not in self._stays:
            before = self.by_pair(stay.parameter, stay.before, but_kept=True)
            later = self.by_pair(stay.parameter, stay.later)
            found = self._stays[stay] = {}
            for pair in (pair for pair in before if pair in later):
                one, some = before[pair][1][0], {*before[pair][1], *later[pair][1]}
                if len(some) > 1:
                    one = self.program.variable("stays", whole=False)
                    for both in itertools.product(before[pair][1], later[pair][1]):
                        ends = [(variable, -1.0) for variable in set(both)]
                        self.program.at_least("stays", [(one, 1.0), *ends], 1.0 - len(ends))
                add(found, one, before[pair][0].copied)
        return self._stays[stay]

    def sum(self, kind: str, reads: tuple[Read, ...]) -> int | None:
        """A variable for the bytes of a kind of a bucket of what some ops are the first to read, as
        `cost.memory.gathers` has them."""
        if (kind, reads) not in self._sums:
            moved = [[(one, v) for v, one, _ in self._fresh_of(read) if one.arriving] for read in reads]
            self._sums[kind, reads] = self.total(kind, moved, kind == "gathered")
        return self._sums[kind, reads]

    def most(self, kind: str, reads: Sequence[Read]) -> float:
        """No less than `sum` of the same can be."""
        return sum(sum(one.alone * getattr(one, kind) for _, one, _ in self._fresh_of(read)) for read in reads)

    def _fresh_of(self, read: Read) -> list[tuple[int, Moving, bool]]:
        """Variables of what an op is the first to read, what moves for each, and whether any op may keep it."""
        if read not in self._fresh:
            earlier = {pair: list(some) for pair, (_, some) in self.by_pair(read.parameter, read.before).items()}
            found = self._fresh[read] = []
            keeps = any(
                self._keeps(flow) for (it, _), some in self.flows.items() if it == read.parameter for flow in some
            )
            for flow in self.flows.get((read.parameter, read.op), []):
                for pair, variable in flow.pairs.items():
                    one, others = self._moving(flow, pair), earlier.get(pair, [])
                    if one.copied:
                        found.append((self._first(variable, others), one, keeps and not pair[0][1]))
                    earlier[pair] = [*others, variable]
        return self._fresh[read]

    def by_pair(
        self, parameter: int, ops: Sequence[int], *, but_kept: bool = False
    ) -> dict[Pair, tuple[Moving, list[int]]]:
        """What moves for a parameter as ops may read it, and the variables of these flows; `but_kept`: of those that do
        not keep it whatever is recomputed."""
        found: dict[Pair, tuple[Moving, list[int]]] = {}
        for op in ops:
            for flow in self.flows.get((parameter, op), []):
                surely = but_kept and self._keeps(flow) and not self.problem.ops[op].again.dropped
                for pair, variable in flow.pairs.items():
                    if surely and not pair[0][1]:
                        continue
                    found.setdefault(pair, (self._moving(flow, pair), []))[1].append(variable)
        return found

    def _first(self, flow: int, earlier: Sequence[int]) -> int:
        """A variable that is at least 1 where a flow is, and none of those earlier."""
        if not earlier:
            return flow
        fresh = self.program.variable("fresh", whole=False)
        self.program.at_least("fresh", [(fresh, 1.0), (flow, -1.0), *((one, 1.0) for one in earlier)], 0.0)
        return fresh

    def _moving(self, flow: Flow, pair: Pair) -> Moving:
        (storage, regather), wanted = pair
        ref = self.problem.ref(flow.tensor)
        return moving(self.memory, self.grouping, ref, storage, wanted.value(), regather=regather)

    def _keeps(self, flow: Flow) -> bool:
        """Whether an op keeps the parameter that it reads for backward, where that is not gathered again."""
        return flow.use.index in self.problem.memory.saved(self.problem.ops[flow.use.op].node)[0]
