"""Memory rows of a forward: what lives at each op of a region, and which copies of parameters are there.

For a pass without backward, each point of `cost.memory.forward_moments` is a row; in a training step, what blocks keep
is added (`solver.memory.forward_part`). Copies of parameters are in `solver.memory.forward_copies`.

Where the blocks of a stage are equal, rows are those of the first, the last and two blocks between, with all that is on
its way in any of these.

Which op of a region is the first to read a parameter that moves depends on the plan. So every op that reads a parameter
has rows as if no op before it had moved one. Where one has, less lands, and the row of what arrives is switched off.
What is there once a bucket has landed counts from the first reader on, whether its parameter moves or not: where it
does not, the rows count more than the prediction, by what arrives next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.backward_transfers import Phase
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.forward_transfers import forward_transfers
from autopar.cost.memory.point import Point
from autopar.cost.traffic import in_segment
from autopar.solver.memory.forward_copies import ForwardCopies, Read, Stay
from autopar.solver.memory.points import Points
from autopar.solver.memory.stage_bytes import UNIT, BucketBytes, add
from autopar.solver.model import Model
from autopar.solver.seconds.replays import Expression, Flow

Rows = Callable[[str, Sequence[Sequence[int | None]], Expression], None]
_OWN = {Phase.BEFORE: "arriving", Phase.LANDING: "landing"}
"""By phase, the field of `TransferBytes` for a region's own parameters until they are there."""


class _Bucket(NamedTuple):
    """Bytes of a kind (a field of `TransferBytes`) of a bucket of what some ops are the first to read: the arguments of
    `ForwardCopies.sum`."""

    kind: str
    reads: tuple[Read, ...]


class _Region(NamedTuple):
    """All that the rows of a region depend on, so that equal regions share rows. `begins`: whether it is the first of
    those that share its buckets; `cut`: whether it has several; `own`: the reads by which its ops are the first to read
    a parameter. `stays`: parameters that a region before has read and this or a later one reads, each with whether the
    last read is in this one. `in_flight`: by phase, buckets that are there beside, each with how often it counts."""

    stage: int
    begins: bool
    cut: bool
    own: tuple[Read, ...]
    stays: tuple[tuple[Stay, bool], ...]
    in_flight: tuple[tuple[Phase, tuple[tuple[_Bucket, int], ...]], ...]


class Sink(Protocol):
    """Takes the `terms` of what lives in a `phase` at a point of an op of a block (0: the first)."""

    def __call__(self, block: int, member: int, phase: Phase, terms: Expression, /) -> None: ...


class ForwardRows:
    """The forward rows of a model. `flows`: by the op read and its reader, both of one block; `memory`, `grouping`:
    those of a pass without backward over the model's graph."""

    def __init__(
        self,
        model: Model,
        flows: Mapping[tuple[int, int], list[Flow]],
        points: Points,
        total: BucketBytes,
        memory: StepMemory,
        grouping: Grouping,
    ) -> None:
        self.problem, self.grouping, self.op_of = model.problem, grouping, model.problem.op_of
        self.lifetimes, self.nodes = self.problem.memory.lifetimes, list(memory.graph.nodes)
        self.points, self.copies = points, ForwardCopies(model, flows, total, memory, grouping)
        self.readers = {
            node: sorted((n for n in node.users if in_segment(n) and n in self.op_of), key=self._at)
            for node in self.nodes
            if memory.is_parameter(node) and node in self.op_of
        }
        self._own = [self._read_first(i) for i in range(len(self.problem.stage_of_region))]

    def add(self, rows: Rows, always: int | None) -> None:
        """Add the rows of a pass without backward; `always`: what lives throughout."""
        for number in range(len(self.problem.stages)):

            def a_row(_: int, __: int, ___: Phase, terms: Expression, name: str = f"stage {number}") -> None:
                rows(name, [[always]], terms)

            self.stage(number, a_row)

    def stage(
        self, number: int, sink: Sink, regions: Container[int] | None = None, landings: Container[int] = ()
    ) -> None:
        """Give what lives at the points of a stage's blocks to `sink`, equal blocks once. Of the `regions` given all
        points count (None: of every region), and in the regions `landings` only those at which a bucket lands."""
        first, stage = self.problem.first_region[number], self.problem.stages[number]
        done: set[tuple[object, ...]] = set()
        for block in range(stage.count):
            lands = first + block in landings
            if regions is not None and first + block not in regions and not lands:
                continue
            region = self._region(first + block)
            if regions is not None and not self._gathers(region):
                continue
            blocks = {block} if block in (0, stage.count - 1) else {1, stage.count - 2}
            for instance in sorted(blocks):
                if (instance, region) not in done:
                    done.add((instance, region))
                    _Block(self, region, instance, sink, landing_alone=lands).add()

    def _gathers(self, region: _Region) -> bool:
        """Whether any copy of a parameter may be there beside the stored one."""
        reads = [bucket.reads for _, buckets in region.in_flight for bucket, _ in buckets]
        return bool(region.stays) or any(map(self.copies.moves, [region.own, *reads]))

    def _at(self, node: fx.Node) -> int:
        return self.lifetimes.position[node]

    # -- regions ------------------------------------------------------------------------------------------------------

    def _read_first(self, i: int) -> tuple[Read, ...]:
        """The reads of parameters by a region's ops, without those that the same op of an earlier equal block did."""
        reads: list[tuple[int, Read]] = []
        for node, readers in self.readers.items():
            regions = [self.grouping.region(reader) for reader in readers]
            for number, (reader, region) in enumerate(zip(readers, regions, strict=True)):
                earlier = tuple(dict.fromkeys(self.op_of[other] for other in readers[:number]))
                if region == i and self.op_of[reader] not in earlier:
                    last = self.op_of[readers[-1]] if regions[-1] == i else None
                    reads.append((self._at(reader), Read(self.op_of[reader], self.op_of[node], earlier, last)))
        return tuple(read for _, read in sorted(reads))

    def _region(self, i: int) -> _Region:
        """What the rows of region `i` depend on."""
        group, stays = self.grouping.together(i), []
        for node, readers in self.readers.items():
            regions = [self.grouping.region(reader) for reader in readers]
            if regions and regions[0] < i <= regions[-1]:
                before, later = dict[int, None](), dict[int, None]()
                for reader, region in zip(readers, regions, strict=True):
                    (before if region < i else later)[self.op_of[reader]] = None
                stays.append((Stay(self.op_of[node], tuple(before), tuple(later)), regions[-1] == i))
        in_flight = []
        for phase, terms in forward_transfers(self.grouping, i).items():
            # Of its own bucket only what later ops read first arrives: each row adds that itself (`_Block._row`).
            own = {(_OWN[phase], i)} if phase in _OWN and not self.grouping.is_cut(i) else set()
            buckets = Counter(_Bucket(kind, self._own[region]) for kind, region in terms if (kind, region) not in own)
            in_flight.append((phase, tuple(buckets.items())))
        begins, stage = i == group.start, self.problem.stage_of_region[i]
        return _Region(stage, begins, self.grouping.is_cut(i), self._own[i], tuple(stays), tuple(in_flight))


class _Block:
    """The rows of one block of a stage; `region`: all that they depend on."""

    def __init__(self, rows: ForwardRows, region: _Region, block: int, sink: Sink, *, landing_alone: bool) -> None:
        self.rows, self.region, self.block, self.sink = rows, region, block, sink
        self.landing_alone = landing_alone
        stage = rows.problem.stages[region.stage]
        self.ops = stage.ops
        self.kind, self.ahead = "next" if block else "first", block * stage.repeat.period if stage.repeat else 0
        self.in_flight = dict(region.in_flight)
        self.there: Expression = {}  # copies that an op has read and this or a later op reads
        self.landed: Expression = {}  # those of a bucket that lands as a whole, once it has

    def add(self) -> None:
        """Walk over the block's ops: copies come with the ops that are the first to read them, and leave with the last
        ones; each point in between has its rows."""
        rows, region = self.rows, self.region
        together = not region.begins or not region.cut
        for stay, _ in region.stays:
            self._change(rows.copies.staying(stay))
        for read in region.own if together else ():
            self._change(rows.copies.copies(read, moves=True), landed=True)
        pending: list[Read] = []
        for member in self.ops:
            reads = [read for read in region.own if read.op == member]
            pending += reads
            before = self.there
            for read in reads:
                self._change(rows.copies.copies(read, moves=False))
                if not together:
                    self._change(rows.copies.copies(read, moves=True))
            node = rows.problem.ops[member].node
            points = rows.lifetimes.points(rows.nodes[rows.lifetimes.position[node] + self.ahead])
            for point in (point for point in points if not point.backward):
                self._point(member, point, pending, before if not together else self.there)
                pending = []
            self._leave(member, together=together)

    def _point(self, member: int, point: Point, pending: Sequence[Read], before: Expression) -> None:
        """The rows of an op at a point. `pending`: what the op, and ops before it without a point, are the first to
        read; `before`: the copies that were there before these."""
        alive, own = self.rows.points.alive.at(member, point, self.kind), self.region.own
        at = self.ops.index(member)
        later = tuple(read for read in own if self.ops.index(read.op) > at)
        seen = len(later) < len(own) or not own
        if self.landing_alone:
            self._landing(member, point, pending, later, before)
            return
        if not self.region.begins or Phase.SINCE not in self.in_flight:
            self._row(
                member, Phase.SINCE if Phase.SINCE in self.in_flight else Phase.BEFORE, [self.there, self.landed, alive]
            )
            return
        if seen:
            self._row(member, Phase.SINCE, [self.there, self.landed, alive])
        self._row(member, Phase.BEFORE, [self.there, alive, self._switched_off(own[: len(own) - len(later)])], later)
        self._landing(member, point, pending, later, before)

    def _landing(
        self, member: int, point: Point, pending: Sequence[Read], later: Sequence[Read], before: Expression
    ) -> None:
        if pending:
            alive = self.rows.points.alive
            parts = [before, alive.passing(point), alive.given(member, point, self.kind)]
            self._row(member, Phase.LANDING, parts, (*pending, *later))

    def _switched_off(self, seen: Sequence[Read]) -> Expression:
        """Terms that disable a row's bytes in flight (big M) where any of the parameters already `seen` moves."""
        terms: Expression = {}
        limit = sum(self.rows.copies.most(*bucket) * times for bucket, times in self.in_flight[Phase.BEFORE])
        limit += self.rows.copies.most("arriving", self.region.own)
        for read in seen:
            if not read.before:  # else it may have moved in an earlier region
                for transfer, variables in self.rows.copies.by_pair(read.parameter, [read.op]).values():
                    for variable in variables if transfer.arriving else ():
                        add(terms, variable, -limit)
        return terms

    def _row(self, member: int, phase: Phase, parts: Sequence[Expression], own: tuple[Read, ...] = ()) -> None:
        """Give a sum of `parts` and what is in flight to the sink; `own`: the region's reads that the bytes that land
        or arrive are for."""
        terms: Expression = {}
        for part in parts:
            for variable, size in part.items():
                add(terms, variable, size)
        restricted = [(_Bucket(_OWN[phase], own), 1)] if own and not self.region.cut else []
        for bucket, times in (*self.in_flight[phase], *restricted):
            bucket_bytes = self.rows.copies.sum(*bucket)
            if bucket_bytes is not None:
                add(terms, bucket_bytes, times * UNIT)
        self.sink(self.block, member, phase, terms)

    def _change(self, change: Expression, sign: float = 1.0, *, landed: bool = False) -> None:
        signed = {variable: sign * size for variable, size in change.items()}
        if landed:
            self.landed = self.rows.points.chain(self.landed, signed)
        elif signed:
            self.there = self.rows.points.chain(self.there, signed)

    def _leave(self, member: int, *, together: bool) -> None:
        """Take off the copies of which this op is the last reader."""
        for stay, over in self.region.stays:
            if over and stay.later[-1] == member:
                self._change(self.rows.copies.staying(stay), -1.0)
        for read in self.region.own:
            if read.last == member:
                self._change(self.rows.copies.copies(read, moves=True, leave=True), -1.0, landed=together)
                self._change(self.rows.copies.copies(read, moves=False, leave=True), -1.0)
