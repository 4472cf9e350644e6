"""What the caller holds of outputs, of storages that ops keep for backward too: keys and values of a cache, say.

Such a storage is among the activations until the backward of its region is through, and then among outputs. Where a
recomputed segment makes it, the replay makes another one: the caller's is there beside it, and since the forward of its
region, unless an op outside the segment keeps the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.memory import Copy, StepMemory
from autopar.graph import TensorRef
from autopar.plans import Segment

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy


class Returned:
    """Of a plan: the strategies `chosen`; regions by node; and what is recomputed."""

    def __init__(
        self,
        memory: StepMemory,
        chosen: Mapping[fx.Node, Strategy],
        region_of: Mapping[fx.Node, int],
        segment_of: Mapping[fx.Node, Segment],
    ) -> None:
        self.by_region: dict[int, int] = {}
        self._remade: dict[int, dict[Copy, int]] = {}
        self._whole: dict[int, int] = {}
        self._inner: dict[Segment, int] = {}
        for node in memory.graph.nodes:
            if node.op != "output" or node not in chosen:
                continue
            for ref, wanted in zip(memory.inputs[node], chosen[node].inputs, strict=True):
                if size := memory.output_bytes(ref, wanted, kept=True):
                    root = memory.roots[ref]
                    self._add(region_of[root.node], segment_of.get(root.node), memory.copy(ref, wanted), size)

    def _add(self, region: int, segment: Segment | None, copy: Copy, size: int) -> None:
        self.by_region[region] = self.by_region.get(region, 0) + size
        if segment is None:
            return
        remade = self._remade.setdefault(region, {})
        remade[copy] = remade.get(copy, 0) + size
        if segment.inner:
            self._inner[segment] = self._inner.get(segment, 0) + size
        else:
            self._whole[region] = self._whole.get(region, 0) + size

    def beside_replay(self, region: int) -> int:
        """Bytes that the caller holds of what the replay of a whole region makes again."""
        return self._whole.get(region, 0)

    def beside_segment(self, segment: Segment) -> int:
        """The same of an inner segment."""
        return self._inner.get(segment, 0)

    def since_forward(self, region: int, kept: Collection[Copy]) -> dict[Copy, int]:
        """What the caller holds since the forward of a region and none of those `kept` by its ops is: bytes by copy."""
        roots: set[TensorRef] = {root for root, _ in kept}
        return {copy: size for copy, size in self._remade.get(region, {}).items() if copy[0] not in roots}
