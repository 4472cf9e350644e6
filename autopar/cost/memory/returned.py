"""What the caller holds of a call: its outputs, and saved tensors of ops that backward never reaches
(`cost.memory.savings`).

An output that no op keeps for backward lives throughout. One that an op also keeps in the same layout (keys and values
of a cache, say) counts among activations until that op's backward ends, and then among outputs. If a recomputed segment
makes it, the replay makes a second one: the caller's is there beside that, from its region's forward on, unless an op
outside the segment keeps it. A replay also saves again what backward never reaches, and this stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.local_workspace import kept_bytes
from autopar.graph import TensorRef
from autopar.plans import Segment

if TYPE_CHECKING:
    from autopar.layout import Layout
    from autopar.strategies.strategy import Strategy


class Returned:
    """What the caller holds under a plan: the strategies `chosen`, the region and the recomputed segment of nodes.

    `always`: bytes that live throughout, by the region that makes them; `by_region`: bytes that ops keep too and bytes
    that replays leave, which count once the backward of their region has ended.
    """

    def __init__(
        self,
        memory: StepMemory,
        chosen: Mapping[fx.Node, Strategy],
        region_of: Mapping[fx.Node, int],
        segment_of: Mapping[fx.Node, Segment],
    ) -> None:
        self.always: dict[int, int] = {}
        self.by_region: dict[int, int] = {}
        self._kept: dict[int, dict[Copy, int]] = {}
        self._left: dict[int, int] = {}
        self._remade: dict[int, dict[Copy, int]] = {}
        self._whole: dict[int, int] = {}
        self._inner: dict[Segment, int] = {}
        self._segment_of, savings = segment_of, memory.savings
        copies: dict[Copy, int] = {}  # all that the caller holds
        for node in memory.graph.nodes:
            if node not in chosen or (node.op != "output" and node not in savings.holding):
                continue
            copies_of_node = savings.held_copies(node, chosen[node])
            internal = kept_bytes(node, chosen[node], memory.mesh_shape, savings.held(node)[2])
            copies.update(copies_of_node)
            _add(self.always, region_of[node], internal)
            if node in segment_of:
                _add(self._left, region_of[node], sum(copies_of_node.values()) + internal)
        kept = _kept(memory, chosen, {root for root, _ in copies}) if copies else set()
        for copy, size in copies.items():
            maker = copy[0].node
            if copy in kept:
                self._add(region_of[maker], segment_of.get(maker), copy, size)
            else:
                _add(self.always, region_of[maker], size)
        for region, size in self._left.items():
            _add(self.by_region, region, size)

    def _add(self, region: int, segment: Segment | None, copy: Copy, size: int) -> None:
        _add(self.by_region, region, size)
        self._kept.setdefault(region, {})[copy] = size
        if segment is None:
            return
        remade = self._remade.setdefault(region, {})
        remade[copy] = remade.get(copy, 0) + size
        if segment.inner:
            self._inner[segment] = self._inner.get(segment, 0) + size
        else:
            _add(self._whole, region, size)

    def beside_replay(self, region: int) -> int:
        """Bytes that the caller holds while the replay of a whole region makes them again, and those that replays in it
        leave."""
        return self._whole.get(region, 0) + self._left.get(region, 0)

    def beside_segment(self, segment: Segment) -> int:
        """The same of an inner segment."""
        return self._inner.get(segment, 0)

    def not_among(self, kept: Collection[Copy], region: int, segment: Segment | None) -> int:
        """Bytes that the caller holds of a region, which are not `kept` and count nowhere else while `segment`, if any,
        is replayed."""
        held_bytes = 0
        for copy, size in self._kept.get(region, {}).items():
            makers_segment = self._segment_of.get(copy[0].node)
            beside_replay = makers_segment is not None and (not makers_segment.inner or makers_segment == segment)
            held_bytes += size if copy not in kept and not beside_replay else 0
        return held_bytes

    def since_forward(self, region: int, kept: Collection[Copy]) -> dict[Copy, int]:
        """By copy, bytes that the caller holds from a region's forward on whose storage the region's ops do not keep
        (`kept`)."""
        roots: set[TensorRef] = {root for root, _ in kept}
        return {copy: size for copy, size in self._remade.get(region, {}).items() if copy[0] not in roots}


def _kept(memory: StepMemory, chosen: Mapping[fx.Node, Strategy], roots: Collection[TensorRef]) -> set[Copy]:
    """The copies of these storages that ops keep for backward."""
    copies: set[Copy] = set()
    for node, strategy in chosen.items():
        inputs, outputs, _ = memory.saved(node)
        saved: list[tuple[TensorRef, Layout]] = [(memory.inputs[node][j], strategy.inputs[j]) for j in inputs]
        saved += [(TensorRef(node, j), strategy.outputs[j]) for j in outputs]
        copies.update(memory.copy(ref, layout) for ref, layout in saved if memory.roots[ref] in roots)
    return copies


def _add(bytes_by_region: dict[int, int], region: int, size: int) -> None:
    if size:
        bytes_by_region[region] = bytes_by_region.get(region, 0) + size
