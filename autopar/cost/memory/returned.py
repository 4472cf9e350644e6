"""What the caller holds of a call: its outputs, and what ops save that backward never comes to (`cost.savings`).

What no op keeps for backward is there all the while. What some op keeps too, in the same layout (keys and values of a
cache, say), is among the activations until its backward is through, and then among outputs. Where a recomputed segment
makes it, the replay makes another one: the caller's is there beside it, and since the forward of its region, unless an
op outside the segment keeps the same. So does a replay save again what backward never comes to, and leaves it there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory.formulas import Copy, StepMemory
from autopar.cost.memory.local_workspace import kept_bytes
from autopar.graph import TensorRef
from autopar.plans import Segment

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


class Returned:
    """Of a plan: the strategies `chosen`; regions by node; and what is recomputed.

    `always`: bytes that are there all the while, by the region that makes them; `by_region`: of what ops keep too, and
    of what replays leave, by the region of which they stay when its backward is through.
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
        held: dict[Copy, int] = {}
        for node in memory.graph.nodes:
            if node not in chosen or (node.op != "output" and node not in savings.holding):
                continue
            copies = savings.held_copies(node, chosen[node])
            beside = kept_bytes(node, chosen[node], memory.mesh_shape, savings.held(node)[2])
            held.update(copies)
            _add(self.always, region_of[node], beside)
            if node in segment_of:
                _add(self._left, region_of[node], sum(copies.values()) + beside)
        kept = _kept(memory, chosen, {root for root, _ in held}) if held else set()
        for copy, size in held.items():
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
        """Bytes that the caller holds of what the replay of a whole region makes again, and of what replays leave."""
        return self._whole.get(region, 0) + self._left.get(region, 0)

    def beside_segment(self, segment: Segment) -> int:
        """The same of an inner segment."""
        return self._inner.get(segment, 0)

    def not_among(self, kept: Collection[Copy], region: int, segment: Segment | None) -> int:
        """What the caller holds of a region that is not among what is `kept`, and counts nowhere else while a segment
        of it is replayed, if any is."""
        found = 0
        for copy, size in self._kept.get(region, {}).items():
            own = self._segment_of.get(copy[0].node)
            beside = own is not None and (not own.inner or own == segment)
            found += size if copy not in kept and not beside else 0
        return found

    def since_forward(self, region: int, kept: Collection[Copy]) -> dict[Copy, int]:
        """What the caller holds since the forward of a region and none of those `kept` by its ops is: bytes by copy."""
        roots: set[TensorRef] = {root for root, _ in kept}
        return {copy: size for copy, size in self._remade.get(region, {}).items() if copy[0] not in roots}


def _kept(memory: StepMemory, chosen: Mapping[fx.Node, Strategy], roots: Collection[TensorRef]) -> set[Copy]:
    """The copies of some storages that ops keep for backward."""
    found: set[Copy] = set()
    for node, strategy in chosen.items():
        inputs, outputs, _ = memory.saved(node)
        refs: Iterable[tuple[TensorRef, int, bool]] = [(memory.inputs[node][j], j, True) for j in inputs]
        for ref, j, is_input in [*refs, *((TensorRef(node, j), j, False) for j in outputs)]:
            if memory.roots[ref] in roots:
                found.add(memory.copy(ref, (strategy.inputs if is_input else strategy.outputs)[j]))
    return found


def _add(some: dict[int, int], region: int, size: int) -> None:
    if size:
        some[region] = some.get(region, 0) + size
