"""What lives on one device in a pass without backward: one moment for every region of the graph.

Nothing is kept. At an op there live weights, what the call is given, values that somebody reads later or that are
returned, the op's own tensors, and copies of parameters: those that are on their way (`autopar.cost.forward_way`), and
each that has come until its last reader is through. One that is moved comes with its bucket; one that is converted on
the spot, or fills a bucket with few others, where it is first read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

from torch import fx

from autopar.cost.forward_way import forward_way
from autopar.cost.memory import Copy
from autopar.cost.moving import Moving
from autopar.cost.naming import stretch_name
from autopar.cost.on_the_way import Phase
from autopar.cost.planned_bytes import PlannedBytes
from autopar.cost.traffic import in_segment
from autopar.layout import Layout
from autopar.plans import Moment


def forward_moments(plan: PlannedBytes) -> tuple[Moment, ...]:
    """The moments of a plan for a pass without backward, in the order of the graph."""
    return _Walk(plan).run()


@dataclass
class _Reads:
    """A parameter as some ops want it, from the first to the last that reads it so; what moves for it."""

    moving: Moving
    first: fx.Node
    last: fx.Node

    @property
    def moves(self) -> bool:
        return self.moving.arriving > 0


class _Walk:
    def __init__(self, plan: PlannedBytes) -> None:
        self.plan, self.memory, self.grouping = plan, plan.memory, plan.grouping
        self.lifetimes = plan.memory.lifetimes
        self.region_of = plan.region_of
        self.copies = self._copies()
        self.always = Counter(self.memory.fixed)
        for node, storage, count in plan.distinct_parameters:
            for part, size in self.memory.parameter_bytes(node, storage).items():
                self.always[part] += count * size
        for node in (n for n in plan.nodes if n in plan.chosen):
            if node.op == "placeholder" or (node.op == "get_attr" and not self.memory.is_parameter(node)):
                self.always["inputs and outputs"] += self.memory.input_bytes(node, plan.chosen[node].outputs[0])
        self._sizes: dict[tuple[str, int], list[int]] = {}  # of parameters by the region that first reads them
        for one in self.copies:
            for kind in ("gathered", "arriving", "landing", "begun"):
                self._sizes.setdefault((kind, self.region_of[one.first]), []).append(getattr(one.moving, kind))

    def run(self) -> tuple[Moment, ...]:
        found = []
        for i, row in enumerate(self.plan.rows):
            parts = self.always + Counter(self._fullest(i))
            name = stretch_name(self.plan.nodes[row.first : row.last + 1])
            found.append(Moment(name, {part: size for part, size in parts.items() if size}))
        return tuple(found)

    def _copies(self) -> list[_Reads]:
        """The copies of parameters that ops read, each with those that read it."""
        found: dict[tuple[fx.Node, Layout], _Reads] = {}
        for node in (n for n in self.plan.nodes if n in self.plan.chosen and in_segment(n)):
            for ref, wanted in zip(self.memory.inputs[node], self.plan.chosen[node].inputs, strict=True):
                if not self.memory.is_parameter(ref.node):
                    continue
                key = ref.node, wanted.value()
                if key in found:
                    found[key].last = node
                elif (moving := self.plan.moved(ref, wanted.value())).copied:
                    found[key] = _Reads(moving, node, node)
        return list(found.values())

    def _fullest(self, i: int) -> dict[str, int]:
        """What is there at the largest point of a region, beside what always is."""
        moved = {phase: sum(starmap(self._bytes, terms)) for phase, terms in forward_way(self.grouping, i).items()}
        here = [one for one in self.copies if self.region_of[one.first] <= i <= self.region_of[one.last]]
        comes = self._arrivals([one for one in here if self.region_of[one.first] == i], lands=Phase.LANDING in moved)
        yet_to_come = sum(one.moving.copied for some in comes.values() for one in some)
        there = sum(one.moving.copied for one in here) - yet_to_come
        phase = Phase.BEFORE if Phase.LANDING in moved or Phase.SINCE not in moved else Phase.SINCE
        landing, most, best = 0, -1, dict[str, int]()
        for node in self.plan.members[i]:
            arrived = comes.get(node, [])
            there += sum(one.moving.copied for one in arrived)
            landing += sum(one.moving.copied for one in arrived if one.moves)
            phase = Phase.SINCE if landing else phase
            for point in self.lifetimes.points(node):
                cases = [(there, phase, self.plan.workspace(point))]
                if landing:
                    size = self._given(node) + self.plan.passing_bytes(point)
                    cases.append((there - landing, Phase.LANDING, size))
                    landing = 0
                for copies, its_phase, size in cases:
                    if copies + moved[its_phase] + size > most:
                        most = copies + moved[its_phase] + size
                        best = {"gathered parameters": copies, "communication buffers": moved[its_phase]}
                        best["workspace"] = size
            there -= sum(one.moving.copied for one in here if one.last is node)
        return best

    def _arrivals(self, own: Sequence[_Reads], *, lands: bool) -> dict[fx.Node, list[_Reads]]:
        """The copies that come in a region, by the ops that they come at: all of a bucket at the first that reads any
        of it. Where none `lands`, what moves has come with a region before."""
        position = self.lifetimes.position
        moving = [one for one in own if one.moves] if lands else []
        at_once = {one.first for one in moving if not self.grouping.is_cut(self.plan.region_of[one.first])}
        landing = min(at_once, key=position.__getitem__, default=None)
        found: dict[fx.Node, list[_Reads]] = {}
        for one in (*moving, *(one for one in own if not one.moves)):
            found.setdefault(landing if one.moves and landing is not None else one.first, []).append(one)
        return found

    def _given(self, node: fx.Node) -> int:
        """What an op reads of values: as they lie where they were made, and as it wants them."""
        found: dict[Copy, int] = {}
        for ref, wanted in zip(self.memory.inputs[node], self.plan.chosen[node].inputs, strict=True):
            if not self.memory.is_parameter(ref.node):
                for layout in (self.plan.chosen[ref.node].outputs[ref.index], wanted):
                    copy = self.memory.copy(ref, layout)
                    found[copy] = self.memory.copy_bytes(copy)
        return sum(found.values())

    def _bytes(self, kind: str, i: int) -> int:
        return self.grouping.largest(i, self._sizes.get((kind, i), []))
