"""What local code knows about the op that it replaces: layouts, global shapes, and this rank's coordinate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.errors import LayoutError
from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.cuts import Cut


@dataclass(frozen=True)
class LocalContext:
    """One node on one rank.

    `inputs` and `input_shapes` go with the node's tensor inputs in the order of `autopar.graph.tensor_inputs`,
    `outputs` and `shapes` with its tensor outputs; shapes are global. `position` is the node's in the graph.
    """

    mesh: LocalMesh
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    position: int
    _local_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)  # read in each call

    def __post_init__(self) -> None:
        shapes = tuple(self._local_shape(index) for index in range(len(self.shapes)))
        object.__setattr__(self, "_local_shapes", shapes)

    def cuts(self, layout: Layout, dim: int, length: int) -> list[tuple[Cut, int]]:
        """The cuts of a dim of global `length`, outermost digit first, each with the piece that this rank takes.

        Computed here and not by `Layout.digits`, as `torch.compile` warns about the cache of that.
        """
        placements = enumerate(layout.placements)
        cuts, parts = [], 1
        for outer, axis in sorted([(p.outer, axis) for axis, p in placements if p.is_sharded and p.dim == dim]):
            cut, rank = Cut(0, length, outer // parts, self.mesh.shape[axis]), self.mesh.coordinate[axis]
            cuts.append((cut, rank))
            length, parts = cut.count(rank), parts * cut.ranks
        return cuts

    def local_shape(self, index: int = 0) -> tuple[int, ...]:
        """This rank's shape of output `index`."""
        return self._local_shapes[index]

    def _local_shape(self, index: int) -> tuple[int, ...]:
        shape = list(self.shapes[index])
        for dim in range(len(shape)):
            for cut, rank in self.cuts(self.outputs[index], dim, shape[dim]):
                shape[dim] = cut.count(rank)
        return tuple(shape)

    def axes_that_shard(self, layout: Layout, *dims: int) -> tuple[int, ...]:
        """Mesh axes of more than one rank that shard one of `dims`."""
        placements = zip(layout.placements, self.mesh.shape, strict=True)
        return tuple(axis for axis, (p, n) in enumerate(placements) if n > 1 and p.is_sharded and p.dim in dims)

    def pieces(self, layout: Layout, dim: int) -> int:
        """Into how many pieces `layout` cuts `dim`."""
        return math.prod([self.mesh.shape[axis] for axis in self.axes_that_shard(layout, dim)])

    def positions(self, layout: Layout, dim: int, length: int, device: torch.device) -> torch.Tensor:
        """The global indices that this rank holds in a dim of global `length`; int32."""
        positions = torch.arange(length, device=device, dtype=torch.int32)
        for cut, rank in self.cuts(layout, dim, length):
            positions = cut.take(positions, rank)
        return positions

    def stretch(self, layout: Layout, dim: int, length: int) -> tuple[int, int]:
        """(start, length) of this rank's part of a dim of global `length`; LayoutError if it is not contiguous."""
        start = 0
        for cut, rank in self.cuts(layout, dim, length):
            if cut.outer != 1:
                raise LayoutError(f"dim {dim} is strided in layout {layout}, where contiguous shards are needed")
            begin, length = cut.runs(rank)[0]
            start += begin
        return start, length


LocalOp = Callable[[Any, tuple[Any, ...], dict[str, Any], LocalContext, torch.Tensor | None], Any]
