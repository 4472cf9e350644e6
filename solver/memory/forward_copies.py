"""Copies of parameters that a forward reads, as expressions that `solver.memory.forward_rows` adds up.

A copy of a parameter stored as l, in the layout w, counts from the first op that reads it in that layout::

    fresh[u,l,w] >= f[u,l,w] - sum of f[t,l,w] over readers t before u

and in later regions, until its last reader, if ops both before and after read it::

    stays[l,w] >= f[t,l,w] + f[u,l,w] - 1       for all readers t before and u to come

In the forward of a training step, a copy that an op keeps for backward stays until the end of the op's region, and then
counts with what the regions before keep.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.transfer_bytes import TransferBytes, transfer_bytes
from autopar.solver.memory.stage_bytes import BucketBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow, Pair


class Read(NamedTuple):
    """An op that reads a parameter, the ops that have read it before, and its last reader of all if that is in this
    region; all by their numbers."""

    op: int
    parameter: int
    before: tuple[int, ...]
    last: int | None


class Stay(NamedTuple):
    """A parameter that ops of regions before have read, and that later ops are still to read."""

    parameter: int
    before: tuple[int, ...]
    later: tuple[int, ...]


class ForwardCopies:
    """The copies of a model. `flows`: by the op read and its reader, both of one block; `memory`, `grouping`: those of
    a pass without backward over the model's graph."""

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
        self._fresh: dict[Read, list[tuple[int, TransferBytes, bool]]] = {}
        self._kept = {parameter for (parameter, _), reading in flows.items() if any(map(self._keeps, reading))}
        self._stays: dict[Stay, Expression] = {}
        self._sums: dict[tuple[str, tuple[Read, ...]], int | None] = {}

    def copies(self, read: Read, *, moves: bool, leave: bool = False) -> Expression:
        """Bytes of the copies that an op is the first to read: of those that move or, if not `moves`, those that are
        converted on the spot. `leave`: without those that may be kept after their last reader."""
        terms: Expression = {}
        for variable, transfer, kept in self._fresh_of(read):
            if moves == (transfer.arriving > 0) and not (leave and kept):
                add(terms, variable, transfer.copied)
        return terms

    def moves(self, reads: Sequence[Read]) -> bool:
        """Whether any copy is made for what some ops are the first to read."""
        return any(self._fresh_of(read) for read in reads)

    def staying(self, stay: Stay) -> Expression:
        """Bytes of a parameter's copies that ops have read and later ops, or the same ops of later blocks, will
        read."""
        if stay not in self._stays:
            before = self.by_pair(stay.parameter, stay.before, but_kept=True)
            later = self.by_pair(stay.parameter, stay.later)
            terms = self._stays[stay] = {}
            for pair in (pair for pair in before if pair in later):
                stays, readers = before[pair][1][0], {*before[pair][1], *later[pair][1]}
                if len(readers) > 1:
                    stays = self.program.variable("stays", whole=False)
                    for both in itertools.product(before[pair][1], later[pair][1]):
                        ends = [(variable, -1.0) for variable in set(both)]
                        self.program.at_least("stays", [(stays, 1.0), *ends], 1.0 - len(ends))
                add(terms, stays, before[pair][0].copied)
        return self._stays[stay]

    def sum(self, field: str, reads: tuple[Read, ...]) -> int | None:
        """A variable for the bytes in a field of `TransferBytes` of the largest bucket of what some ops are the first
        to read, as in `cost.memory.forward_copies`."""
        if (field, reads) not in self._sums:
            transfers = [
                [(transfer, v) for v, transfer, _ in self._fresh_of(read) if transfer.arriving] for read in reads
            ]
            self._sums[field, reads] = self.total(field, transfers, field == "gathered")
        return self._sums[field, reads]

    def most(self, field: str, reads: Sequence[Read]) -> float:
        """An upper bound on `sum` of the same arguments, in bytes."""
        return sum(
            sum(transfer.alone * getattr(transfer, field) for _, transfer, _ in self._fresh_of(read)) for read in reads
        )

    def _fresh_of(self, read: Read) -> list[tuple[int, TransferBytes, bool]]:
        """The copies that an op is the first to read: each one's variable, what moves for it, and whether an op may
        keep it."""
        if read not in self._fresh:
            earlier = {
                pair: list(variables) for pair, (_, variables) in self.by_pair(read.parameter, read.before).items()
            }
            fresh = self._fresh[read] = []
            keeps = any(
                self._keeps(flow)
                for (parameter, _), flows in self.flows.items()
                if parameter == read.parameter
                for flow in flows
            )
            for flow in self.flows.get((read.parameter, read.op), []):
                for pair, variable in flow.pairs.items():
                    transfer, earlier_flows = self._transfer(flow, pair), earlier.get(pair, [])
                    if transfer.copied:
                        fresh.append((self._first(variable, earlier_flows), transfer, keeps and not pair[0][1]))
                    earlier[pair] = [*earlier_flows, variable]
        return self._fresh[read]

    def by_pair(
        self, parameter: int, ops: Sequence[int], *, but_kept: bool = False
    ) -> dict[Pair, tuple[TransferBytes, list[int]]]:
        """By storage and wanted layout, what moves for a parameter, and the variables of the ops' flows; `but_kept`:
        without flows to ops that keep it whatever is recomputed."""
        transfers: dict[Pair, tuple[TransferBytes, list[int]]] = {}
        for op in ops:
            for flow in self.flows.get((parameter, op), []):
                surely = but_kept and self._keeps(flow) and not self.problem.ops[op].again.dropped
                for pair, variable in flow.pairs.items():
                    if surely and not pair[0][1]:
                        continue
                    transfers.setdefault(pair, (self._transfer(flow, pair), []))[1].append(variable)
        return transfers

    def _first(self, flow: int, earlier: Sequence[int]) -> int:
        """A variable that is at least 1 where a flow is 1 and none of the `earlier` ones is."""
        if not earlier:
            return flow
        fresh = self.program.variable("fresh", whole=False)
        self.program.at_least("fresh", [(fresh, 1.0), (flow, -1.0), *((variable, 1.0) for variable in earlier)], 0.0)
        return fresh

    def _transfer(self, flow: Flow, pair: Pair) -> TransferBytes:
        (storage, regather), wanted = pair
        ref = self.problem.ref(flow.tensor)
        return transfer_bytes(self.memory, self.grouping, ref, storage, wanted.value(), regather=regather)

    def _keeps(self, flow: Flow) -> bool:
        """Whether an op keeps the parameter that it reads for backward, unless it is gathered again."""
        return flow.use.index in self.problem.memory.saved(self.problem.ops[flow.use.op].node)[0]
