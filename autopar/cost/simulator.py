"""Simulates one planned step on a compute stream and one communication stream for each mesh axis.

The order is the runtime's (`communication.transit`). Ops run one after another, forward and backward, then the
optimizer. Collectives of activations are waited for. A bucket's gather begins while buckets before it are still read
(`cost.buckets.ahead`). A bucket's reduction begins when the last of its gradients is there, and is waited for at the
end of backward, or earlier because of the memory that it holds (`cost.buckets.reductions`). A stream runs one
collective at a time, in the order in which they begin. While one runs, compute goes on at `device.overlap` of its rate;
of several that run at once on different streams, each takes as much from it.

Exposed communication results from the simulation here, while `cost.overlap` bounds it; tests compare the two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.ahead import due_ahead
from autopar.cost.buckets.reductions import due
from autopar.cost.simulated import COMPUTE, Event, Simulated
from autopar.cost.traffic import Transfer, in_segment, saves_inputs_alone
from autopar.plans import Segment

_Bucket = tuple[str, int]  # the phase in which its collectives run (`Transfer.phase`), and its number


@dataclass
class _Line:
    """A communication stream: the start and end of each of its collectives."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, earliest: float, seconds: float) -> tuple[float, float]:
        start = max(earliest, self.ends[-1] if self.ends else 0.0)
        self.starts.append(start)
        self.ends.append(start + seconds)
        return start, start + seconds

    def busy_until(self, now: float) -> float:
        """When the collective that runs at `now` ends; `now` if there is none."""
        i = bisect_right(self.starts, now) - 1
        return max(now, self.ends[i]) if i >= 0 else now

    def next_start(self, now: float) -> float:
        i = bisect_right(self.starts, now)
        return self.starts[i] if i < len(self.starts) else float("inf")


@dataclass
class _Flight:
    """A bucket in flight: its collectives that have not begun, and when the one that runs ends."""

    phase: str
    left: list[Transfer]
    handed_bytes: int
    end: float = 0.0
    in_place: bool = True
    launched: int = 0
    under_way_bytes: int = 0

    @property
    def goes_on(self) -> bool:
        return bool(self.left)

    @property
    def holds_more(self) -> bool:
        return self.goes_on or not self.in_place


class _Gathered(NamedTuple):
    """A bucket that is gathered, as `cost.buckets.ahead.Gather` requires."""

    bucket: _Bucket
    gathers: int
    read_bytes: int


def simulate(
    graph: fx.Graph,
    cluster: Cluster,
    seconds: dict[fx.Node, tuple[float, float]],
    transfers: Sequence[Transfer],
    segments: Sequence[Segment],
    *,
    micro_batches: int = 1,
    optimizer_seconds: float = 0.0,
    train: bool = True,
) -> Simulated:
    """Simulate a step.

    `seconds`: of every op, forward and backward; `transfers`: the collectives of one micro-batch (`cost.traffic`).
    """
    return _Simulation(graph, cluster, seconds, transfers, segments).run(micro_batches, optimizer_seconds, train)


class _Simulation:
    """The state of one simulation: `now` is the time of the compute stream, `lines` are the communication streams."""

    def __init__(
        self,
        graph: fx.Graph,
        cluster: Cluster,
        seconds: dict[fx.Node, tuple[float, float]],
        transfers: Sequence[Transfer],
        segments: Sequence[Segment],
    ) -> None:
        self.nodes = list(graph.nodes)
        self.cluster, self.seconds = cluster, seconds
        self.taken = 1.0 - cluster.device.overlap  # the part of the compute rate that each running collective takes
        self.lines = [_Line() for _ in cluster.axes]
        self.events: list[Event] = []
        self.now = self.alone = 0.0
        self.flights: list[_Flight] = []  # reductions that were begun
        self.own: defaultdict[tuple[str, fx.Node], list[Transfer]] = defaultdict(list)  # in no bucket: waited for
        self.buckets: defaultdict[_Bucket, list[Transfer]] = defaultdict(list)
        self.due: defaultdict[tuple[str, fx.Node], list[int]] = defaultdict(list)  # the buckets that are due at a node
        for transfer in transfers:
            at, bucket = (transfer.phase, transfer.node), (transfer.phase, transfer.bucket)
            if transfer.bucket < 0:
                self.own[at].append(transfer)
                continue
            if not self.buckets[bucket]:
                self.due[at].append(transfer.bucket)
            self.buckets[bucket].append(transfer)
        self.longest = max((len(moves) for moves in self.buckets.values()), default=0)
        self.segment_of = {node: s for s in segments for node in self.nodes[s.first : s.last + 1] if in_segment(node)}
        self.begun: dict[_Bucket, _Flight] = {}  # gathers that were begun ahead of use

    def run(self, micro_batches: int, optimizer_seconds: float, train: bool) -> Simulated:
        for number in range(micro_batches):
            self.begun.clear()
            self._forward()
            if train:
                self._backward(last=number == micro_batches - 1)
        for flight in self.flights:
            self._finish(flight)
        if train and optimizer_seconds:
            self._compute("optimizer step", optimizer_seconds, "optimizer")
        names = (COMPUTE, *(axis.name for axis in self.cluster.axes))
        return Simulated(tuple(self.events), self.now, names, self.alone)

    # -- the two passes -----------------------------------------------------------------------------------------------

    def _forward(self) -> None:
        route = [("forward", bucket) for node in self.nodes for bucket in self.due["forward", node]]
        for node in self.nodes:
            self._before(node, "forward", route)
            self._compute(node.name, self.seconds.get(node, (0.0, 0.0))[0], "forward")

    def _backward(self, *, last: bool) -> None:
        route = self._backward_route()
        replayed: set[int] = set()
        for node in reversed(self.nodes):
            segment = self.segment_of.get(node)
            if segment is not None and segment.first not in replayed:
                replayed.add(segment.first)
                self._replay(segment, route)
            for bucket in self.due["again", node]:
                self._gather(("again", bucket), route)
            self._compute(node.name, self.seconds.get(node, (0.0, 0.0))[1], "backward")
            for transfer in self.own["backward", node]:
                self._wait_for(transfer, "backward")
            if last:
                for bucket in self.due["reduction", node]:
                    self._reduce(bucket)

    def _replay(self, segment: Segment, route: Sequence[_Bucket]) -> None:
        """Recompute a segment up to the last node that saves something."""
        end = segment.replayed if segment.replayed >= 0 else segment.last
        for node in self.nodes[segment.first : end + 1]:
            if in_segment(node):
                self._before(node, "replay", route)
                if node is self.nodes[end] and saves_inputs_alone(node):
                    return  # autograd saves the inputs before it computes, and the replay stops there
                self._compute(node.name, self.seconds.get(node, (0.0, 0.0))[0], "replay")

    def _before(self, node: fx.Node, phase: str, route: Sequence[_Bucket]) -> None:
        for bucket in self.due[phase, node]:
            self._gather((phase, bucket), route)
        for transfer in self.own[phase, node]:
            self._wait_for(transfer, phase)

    def _backward_route(self) -> list[_Bucket]:
        """The buckets in the order in which backward gathers them."""
        buckets: list[_Bucket] = []
        seen: set[int] = set()
        for node in reversed(self.nodes):
            segment = self.segment_of.get(node)
            if segment is not None and segment.first not in seen:
                seen.add(segment.first)
                inside = self.nodes[segment.first : segment.last + 1]
                buckets += [("replay", bucket) for inner in inside for bucket in self.due["replay", inner]]
            buckets += [("again", bucket) for bucket in self.due["again", node]]
        return buckets

    # -- streams ------------------------------------------------------------------------------------------------------

    def _gather(self, bucket: _Bucket, route: Sequence[_Bucket]) -> None:
        """Wait for a bucket's gather, and begin the collectives of later buckets that are due ahead."""
        behind = route[route.index(bucket) + 1 :]
        flight = self.begun.pop(bucket) if bucket in self.begun else self._begin(bucket)
        self._go_ahead(bucket, behind, read=False)
        self._finish(flight)
        self._go_ahead(bucket, behind, read=True)

    def _go_ahead(self, bucket: _Bucket, behind: Sequence[_Bucket], *, read: bool) -> None:
        """Begin the collectives of the buckets `behind` this one that are due ahead."""
        here, after = self._gathered(bucket), map(self._gathered, behind)
        for gathered, collectives in due_ahead(here, after, self.longest, read=read):
            if gathered.bucket not in self.begun:
                self.begun[gathered.bucket] = self._begin(gathered.bucket)
            else:
                while self.begun[gathered.bucket].launched < collectives:
                    self._land(self.begun[gathered.bucket])

    def _gathered(self, bucket: _Bucket) -> _Gathered:
        moves = self.buckets[bucket]
        ranks = self.cluster.axes[moves[-1].axis].size if moves[-1].kind == "all_gather" else 1
        return _Gathered(bucket, len(moves), ranks * moves[-1].bytes)

    def _reduce(self, bucket: int) -> None:
        """Begin a bucket's reduction, after waiting for earlier ones that hold too much memory."""
        for flight in due(self.flights, self._bytes(("reduction", bucket))):
            self._land(flight)
        self.flights.append(self._begin(("reduction", bucket)))

    def _bytes(self, bucket: _Bucket) -> int:
        return self.buckets[bucket][0].bytes

    def _begin(self, bucket: _Bucket) -> _Flight:
        """Put a bucket's first collective on its stream."""
        phase = {"again": "backward", "reduction": "backward"}.get(bucket[0], bucket[0])
        flight = _Flight(phase, list(self.buckets[bucket]), self._bytes(bucket))
        self._launch(flight)
        return flight

    def _launch(self, flight: _Flight) -> None:
        under_way = flight.left.pop(0)
        flight.launched += 1
        flight.under_way_bytes = under_way.bytes
        flight.end, flight.in_place = self._put(under_way, self.now, flight.phase), under_way.kind == "all_reduce"

    def _land(self, flight: _Flight) -> None:
        """Wait for a bucket's running collective, and begin the next one, if there is one."""
        self.now, flight.in_place = max(self.now, flight.end), True
        if flight.left:
            self._launch(flight)

    def _finish(self, flight: _Flight) -> None:
        while flight.left:
            self._land(flight)
        self._land(flight)

    def _wait_for(self, transfer: Transfer, phase: str) -> None:
        self.now = max(self.now, self._put(transfer, self.now, phase))

    def _put(self, transfer: Transfer, earliest: float, phase: str) -> float:
        """Put a collective on its stream, to begin at `earliest` or when the stream is free; returns when it ends."""
        if not transfer.seconds:
            return earliest
        start, end = self.lines[transfer.axis].add(earliest, transfer.seconds)
        name = f"{transfer.kind.replace('_', '-')}, {transfer.cause}"
        self.events.append(Event(name, self.cluster.axes[transfer.axis].name, start, transfer.seconds, phase))
        return end

    def _compute(self, name: str, seconds: float, phase: str) -> None:
        """Run an op on the compute stream, slowed down while collectives run."""
        if not seconds:
            return
        self.alone += seconds
        at, left = self.now, seconds
        while True:
            busy = [line.busy_until(at) for line in self.lines]
            beside = max(busy) > at
            until = max(busy) if beside else min((line.next_start(at) for line in self.lines), default=float("inf"))
            if beside:  # the rate is constant until the first of the running collectives ends
                until = min(end for end in busy if end > at)
            rate = max(0.0, 1.0 - self.taken * sum(end > at for end in busy))
            if left <= rate * (until - at):
                at += left / rate
                break
            left -= rate * (until - at)
            at = until
        self.events.append(Event(name, COMPUTE, self.now, at - self.now, phase))
        self.now = at
