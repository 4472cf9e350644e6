"""Copies of parameters that the ops of a forward read, region by region, and the buckets on their way for them.

A copy is there from its arrival until its last reader has run. A copy that is gathered arrives with its bucket
(`cost.memory.forward_way`); one that is converted on the spot, or whose region's parameters fill several buckets,
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
from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.forward_way import forward_way
from autopar.cost.memory.moving import Moving, largest, moving
from autopar.cost.memory.on_the_way import Phase
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.memory.point import Point
from autopar.cost.traffic import in_segment
from autopar.graph import is_cast_input
from autopar.layout import Layout


class Case(NamedTuple):
    """A point of an op's forward, once its parameters are there or while they land (`lands`): bytes of `copies` of
    parameters, and of what is on its way (`moved`)."""

    point: Point
    lands: bool
    copies: int
    moved: int


@dataclass
class _Reads:
    """A parameter in a layout that some ops want: what moves for it; the first and the last op that read it so; and the
    first that keeps the copy for backward."""

    moving: Moving
    first: fx.Node
    last: fx.Node
    keeper: fx.Node | None = None

    @property
    def moves(self) -> bool:
        return self.moving.arriving > 0


class Gathers:
    """The copies of a plan's forward; `memory`, `grouping`: those of a pass without backward over its graph."""

    def __init__(self, plan: PlannedBytes, memory: StepMemory, grouping: Grouping) -> None:
        self.plan, self.memory, self.grouping = plan, memory, grouping
        self.region_of = plan.region_of
        self.copies = self._copies()
        self._moving: dict[int, list[Moving]] = {}  # of parameters by the region that first reads them
        for one in self.copies:
            self._moving.setdefault(self.region_of[one.first], []).append(one.moving)

    def region(self, i: int) -> Arrivals:
        """What arrives in a region; its ops are asked for in order."""
        return Arrivals(self, i)

    def _copies(self) -> list[_Reads]:
        """The copies of parameters that ops read, each with its readers."""
        found: dict[tuple[fx.Node, Layout], _Reads] = {}
        for node in (n for n in self.plan.nodes if n in self.plan.chosen and in_segment(n)):
            saved = () if node in self.plan.segment_of else self.plan.memory.saved(node)[0]
            pairs = zip(self.memory.inputs[node], self.plan.chosen[node].inputs, strict=True)
            for j, (ref, wanted) in enumerate(pairs):
                if not self.memory.is_parameter(ref.node):
                    continue
                key, regather = (ref.node, wanted.value()), self.plan.regathers(ref.node)
                if key in found:
                    found[key].last = node
                else:
                    storage = self.plan.storage(ref.node)
                    one = moving(self.memory, self.grouping, ref, storage, wanted.value(), regather=regather)
                    if not one.copied:
                        continue
                    found[key] = _Reads(one, node, node)
                if j in saved and not regather:
                    found[key].keeper = found[key].keeper or node
        return list(found.values())

    def bytes(self, kind: str, i: int) -> int:
        """Bytes of a kind (a field of `Moving`) of a region's largest bucket, as its buckets arrive one by one."""
        return largest(self._moving.get(i, ()), kind, together=kind == "gathered")


class Arrivals:
    """The copies that arrive and leave in one region."""

    def __init__(self, of: Gathers, i: int) -> None:
        self.of, self.plan, self.lifetimes = of, of.plan, of.plan.memory.lifetimes
        self.moved = {phase: sum(starmap(of.bytes, terms)) for phase, terms in forward_way(of.grouping, i).items()}
        where = of.region_of
        self.here = [
            one
            for one in of.copies
            if where[one.first] <= i <= where[one.last] and (one.keeper is None or i <= where[one.keeper])
        ]
        own = [one for one in self.here if where[one.first] == i]
        self.comes = self._arrivals(own, lands=Phase.LANDING in self.moved)
        yet_to_come = sum(one.moving.copied for some in self.comes.values() for one in some)
        self.there = sum(one.moving.copied for one in self.here) - yet_to_come
        self.landing = 0
        late = Phase.LANDING in self.moved or Phase.SINCE not in self.moved
        self.phase = Phase.BEFORE if late else Phase.SINCE

    def at(self, node: fx.Node) -> list[Case]:
        """The points of an op; the region's ops before it must have been asked for."""
        arrived = self.comes.get(node, [])
        self.there += sum(one.moving.copied for one in arrived)
        self.landing += sum(one.moving.copied for one in arrived if one.moves)
        self.phase = Phase.SINCE if self.landing else self.phase
        found = []
        for point in (point for point in self.lifetimes.points(node) if not point.backward):
            found.append(Case(point, False, self.there, self.moved[self.phase]))
            if self.landing:
                found.append(Case(point, True, self.there - self.landing, self.moved[Phase.LANDING]))
                self.landing = 0
        self.there -= sum(one.moving.copied for one in self.here if one.last is node and one.keeper is None)
        return found

    def beside(self, case: Case) -> int:
        """What else lives at a point alone."""
        if case.lands:
            return self._given(case.point.node) + self.plan.momentary.passing_bytes(case.point)
        return self.plan.momentary.bytes_at(case.point)

    def _arrivals(self, own: Sequence[_Reads], *, lands: bool) -> dict[fx.Node, list[_Reads]]:
        """The copies that arrive in a region, by the op at which they do: all of a bucket at the first op that reads
        any of it. If no bucket `lands` here, what moves has arrived with an earlier region."""
        position = self.lifetimes.position
        moving = [one for one in own if one.moves] if lands else []
        at_once = {one.first for one in moving if not self.of.grouping.is_cut(self.plan.region_of[one.first])}
        landing = min(at_once, key=position.__getitem__, default=None)
        found: dict[fx.Node, list[_Reads]] = {}
        for one in (*moving, *(one for one in own if not one.moves)):
            found.setdefault(landing if one.moves and landing is not None else one.first, []).append(one)
        return found

    def _given(self, node: fx.Node) -> int:
        """Bytes of the inputs that no op before keeps, in their makers' layouts and in those that the op wants."""
        found: dict[Copy, int] = {}
        memory, chosen = self.plan.memory, self.plan.chosen
        for j in self.lifetimes.unsaved(node):
            ref, wanted = memory.inputs[node][j], chosen[node].inputs[j]
            if not memory.is_parameter(ref.node):
                made = chosen[ref.node].outputs[ref.index]
                for layout in (wanted,) if is_cast_input(ref.node) else (made, wanted):
                    copy = memory.copy(ref, layout)
                    found[copy] = memory.copy_bytes(copy)
        return sum(found.values())
