"""Copies of parameters that the ops of a forward read, region by region, and the buckets in flight for them.

A copy is there from its arrival until its last reader has run. A copy that is gathered arrives with its bucket
(`cost.memory.forward_transfers`); one that is converted on the spot, or whose region's parameters fill several buckets,
arrives at its first reader. In the forward of a training step, a copy that an op keeps for backward counts after the
op's region among what the regions before have kept (`cost.memory.moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.backward_transfers import Phase
from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.forward_transfers import forward_transfers
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.memory.point import Point
from autopar.cost.memory.transfer_bytes import TransferBytes, largest_bucket_bytes, transfer_bytes
from autopar.cost.traffic import in_segment
from autopar.graph import is_cast_input
from autopar.layout import Layout


class ForwardPoint(NamedTuple):
    """A point of an op's forward, once its parameters are there or while they land (`lands`): bytes of `copies` of
    parameters, and of buckets `in_flight`."""

    point: Point
    lands: bool
    copies: int
    in_flight: int


@dataclass
class _Copy:
    """A parameter in a layout that some ops want: the first and the last op that read it so; and the first that keeps
    it for backward."""

    transfer: TransferBytes
    first_reader: fx.Node
    last_reader: fx.Node
    keeper: fx.Node | None = None

    @property
    def is_gathered(self) -> bool:
        return self.transfer.arriving > 0

    @property
    def bytes(self) -> int:
        return self.transfer.copied


class ForwardCopies:
    """The copies of a plan's forward; `memory`, `grouping`: those of a pass without backward over its graph."""

    def __init__(self, plan: PlannedBytes, memory: StepMemory, grouping: Grouping) -> None:
        self.plan, self.memory, self.grouping = plan, memory, grouping
        self._copies = self._copies_of_plan()

    def region(self, i: int) -> RegionCopies:
        """The copies of a region; its ops are asked for in order."""
        region_of = self.plan.region_of
        here = [
            copy
            for copy in self._copies
            if region_of[copy.first_reader] <= i <= region_of[copy.last_reader]
            and (copy.keeper is None or i <= region_of[copy.keeper])
        ]
        return RegionCopies(self, i, here)

    def bucket_bytes(self, field: str, i: int) -> int:
        """The bytes in a field of `TransferBytes` of the largest bucket of the parameters that a region is the first to
        read, as its buckets arrive one by one."""
        first_read = [copy.transfer for copy in self._copies if self.plan.region_of[copy.first_reader] == i]
        return largest_bucket_bytes(first_read, field, together=field == "gathered")

    def _copies_of_plan(self) -> list[_Copy]:
        copies: dict[tuple[fx.Node, Layout], _Copy] = {}
        for node in (n for n in self.plan.nodes if n in self.plan.chosen and in_segment(n)):
            saved = () if node in self.plan.segment_of else self.plan.memory.saved(node)[0]
            pairs = zip(self.memory.inputs[node], self.plan.chosen[node].inputs, strict=True)
            for j, (ref, wanted) in enumerate(pairs):
                if not self.memory.is_parameter(ref.node):
                    continue
                key, regather = (ref.node, wanted.value()), self.plan.regathers(ref.node)
                if key in copies:
                    copies[key].last_reader = node
                else:
                    storage = self.plan.storage(ref.node)
                    transfer = transfer_bytes(
                        self.memory, self.grouping, ref, storage, wanted.value(), regather=regather
                    )
                    if not transfer.copied:
                        continue
                    copies[key] = _Copy(transfer, node, node)
                if j in saved and not regather:
                    copies[key].keeper = copies[key].keeper or node
        return list(copies.values())


class RegionCopies:
    """The copies that are read in one region (`here`): which arrive in it, and when."""

    def __init__(self, forward: ForwardCopies, i: int, here: Sequence[_Copy]) -> None:
        self._plan, self._grouping, self._lifetimes = forward.plan, forward.grouping, forward.plan.memory.lifetimes
        self._here = here
        terms_of = forward_transfers(forward.grouping, i)
        self._in_flight = {phase: sum(starmap(forward.bucket_bytes, terms)) for phase, terms in terms_of.items()}
        first_read = [copy for copy in here if self._plan.region_of[copy.first_reader] == i]
        self._arrivals = self._arrivals_of(first_read, lands=Phase.LANDING in terms_of)
        yet_to_come = sum(copy.bytes for copies in self._arrivals.values() for copy in copies)
        self._there_bytes = sum(copy.bytes for copy in here) - yet_to_come
        self._landing_bytes = 0
        late = Phase.LANDING in terms_of or Phase.SINCE not in terms_of
        self._phase = Phase.BEFORE if late else Phase.SINCE

    def at(self, node: fx.Node) -> list[ForwardPoint]:
        """The points of an op; the region's ops before it must have been asked for."""
        arrived = self._arrivals.get(node, [])
        self._there_bytes += sum(copy.bytes for copy in arrived)
        self._landing_bytes += sum(copy.bytes for copy in arrived if copy.is_gathered)
        self._phase = Phase.SINCE if self._landing_bytes else self._phase
        points = []
        for point in (point for point in self._lifetimes.points(node) if not point.backward):
            points.append(ForwardPoint(point, False, self._there_bytes, self._in_flight[self._phase]))
            if self._landing_bytes:
                there = self._there_bytes - self._landing_bytes
                points.append(ForwardPoint(point, True, there, self._in_flight[Phase.LANDING]))
                self._landing_bytes = 0
        self._there_bytes -= sum(c.bytes for c in self._here if c.last_reader is node and c.keeper is None)
        return points

    def beside(self, forward_point: ForwardPoint) -> int:
        """What else lives at a point alone."""
        point = forward_point.point
        if forward_point.lands:
            return self._inputs_bytes(point.node) + self._plan.momentary.passing_bytes(point)
        return self._plan.momentary.bytes_at(point)

    def _arrivals_of(self, first_read: Sequence[_Copy], *, lands: bool) -> dict[fx.Node, list[_Copy]]:
        """The copies that arrive in a region, by the op at which they do: all of a bucket at the first op that reads
        any of it. If no bucket `lands` here, what is gathered has arrived with an earlier region."""
        position = self._lifetimes.position
        gathered = [copy for copy in first_read if copy.is_gathered] if lands else []
        converted = [copy for copy in first_read if not copy.is_gathered]
        whole_bucket = {
            copy.first_reader for copy in gathered if not self._grouping.is_cut(self._plan.region_of[copy.first_reader])
        }
        landing = min(whole_bucket, key=position.__getitem__, default=None)
        arrivals: dict[fx.Node, list[_Copy]] = {}
        for copy in gathered:
            arrivals.setdefault(landing or copy.first_reader, []).append(copy)
        for copy in converted:
            arrivals.setdefault(copy.first_reader, []).append(copy)
        return arrivals

    def _inputs_bytes(self, node: fx.Node) -> int:
        """Bytes of the inputs that no op before keeps, in their makers' layouts and in those that the op wants."""
        sizes: dict[Copy, int] = {}
        memory, chosen = self._plan.memory, self._plan.chosen
        for j in self._lifetimes.unsaved(node):
            ref, wanted = memory.inputs[node][j], chosen[node].inputs[j]
            if not memory.is_parameter(ref.node):
                made = chosen[ref.node].outputs[ref.index]
                for layout in (wanted,) if is_cast_input(ref.node) else (made, wanted):
                    copy = memory.copy(ref, layout)
                    sizes[copy] = memory.copy_bytes(copy)
        return sum(sizes.values())
