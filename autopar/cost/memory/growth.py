"""What a region keeps for backward as its ops run one by one, in forward or in a replay.

An inner segment keeps its inputs. What its ops save is there while they run; afterwards, what nothing else reads is
freed. While backward replays the segment, what the caller holds of its results is there besides.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopar.cost.memory.formulas import Copy
from autopar.cost.memory.planned_bytes import ParameterCopy, PlannedBytes
from autopar.cost.traffic import in_segment
from autopar.plans import Segment


class Growth:
    """Of region `i`: bytes by part that have grown so far (`parts`). `kept`: storages that are there already.
    `backward`: whether to count the copies of parameters that ops keep, and what the caller holds beside replays."""

    def __init__(self, plan: PlannedBytes, i: int, kept: set[Copy], *, backward: bool = True) -> None:
        self.plan, self.memory, self._i = plan, plan.memory, i
        self.parts: Counter[str] = Counter()
        self._again, self._kept = "replayed block" if i in plan.recomputed else "", set(kept)
        self._backward = backward
        self._there: set[ParameterCopy] = set()
        self._segment: Segment | None = None

    def begin(self, node: fx.Node) -> None:
        """Proceed to the next op in the order of the graph, leaving and entering segments."""
        segment = self.plan.segment_of.get(node, self._segment if not in_segment(node) else None)
        if segment == self._segment:
            return
        if self._segment is not None and self._segment.inner:  # its replay comes later, or its forward is over
            self._leave(self._segment)
        if segment is not None and segment.inner:
            copies = self.plan.inner_inputs(segment) - self._kept
            self.parts["activations"] += sum(map(self.memory.copy_bytes, copies))
            self._kept |= copies
            self.parts["inputs and outputs"] += self.plan.returned.beside_segment(segment) if self._backward else 0
        self._segment = segment

    def keep(self, node: fx.Node) -> None:
        """Add what the op keeps."""
        inner = self._segment is not None and self._segment.inner
        part = "replayed block" if inner else self._again or "activations"
        self.parts[part] += self.plan.beside(node)
        copies = self.plan.copies(node) - self._kept
        self.parts[part] += sum(map(self.memory.copy_bytes, copies))
        self._kept |= copies
        for key, size in self.plan.kept_parameters(node).items() if self._backward else ():
            self.parts["gathered parameters"] += size if key not in self._there else 0
            self._there.add(key)

    def yet_to_keep(self) -> int:
        """Bytes that the caller holds of this region and that only later ops, or those of other regions, keep."""
        return self.plan.returned.not_among(self._kept, self._i, self._segment)

    def _leave(self, segment: Segment) -> None:
        """Take off what only lives while an inner segment's ops run: saved tensors that nothing else reads."""
        plan, lifetimes = self.plan, self.memory.lifetimes
        nodes = [n for n in plan.nodes[segment.first : segment.last + 1] if n in plan.chosen and in_segment(n)]
        saved = {copy for node in nodes for copy in plan.copies(node)}
        gone = {
            copy
            for copy in (saved & self._kept) - plan.inner_inputs(segment)
            if lifetimes.stays_within(copy[0], segment.first, segment.last)
        }
        self.parts["replayed block"] -= sum(map(self.memory.copy_bytes, gone)) + sum(map(plan.beside, nodes))
        self._kept -= gone
        if self._backward:
            self.parts["inputs and outputs"] -= plan.returned.beside_segment(segment)
            parameters = {key: size for node in nodes for key, size in plan.kept_parameters(node).items()}
            self.parts["gathered parameters"] -= sum(parameters.values())
            self._there -= parameters.keys()
