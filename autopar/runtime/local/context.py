"""What local code knows of the op it stands for: layouts, global shapes, and where this rank is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import LayoutError
from autopar.layout import Layout, R, shard, take_shard
from autopar.runtime.collectives import LocalMesh
from autopar.runtime.cuts import Cut


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

    def local_shape(self, index: int = 0) -> tuple[int, ...]:
        """This rank's shape of output `index`."""
        return self.outputs[index].local_shape(self.shapes[index], self.mesh.shape, self.mesh.coordinate)

    def axes_that_shard(self, layout: Layout, *dims: int) -> tuple[int, ...]:
        """Mesh axes of more than one rank that shard one of `dims`."""
        placements = zip(layout.placements, self.mesh.shape, strict=True)
        return tuple(axis for axis, (p, n) in enumerate(placements) if n > 1 and p.is_sharded and p.dim in dims)

    def pieces(self, layout: Layout, dim: int) -> int:
        """Into how many pieces `layout` cuts `dim`."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes_that_shard(layout, dim))

    def positions(self, layout: Layout, dim: int, length: int, device: torch.device) -> torch.Tensor:
        """Global indices, in a dim of global `length`, of what this rank holds; int32."""
        whole = torch.arange(length, device=device, dtype=torch.int32)
        cut = (shard(0, p.outer) if p.is_sharded and p.dim == dim else R for p in layout.placements)
        return take_shard(whole, Layout(tuple(cut)), self.mesh.shape, self.mesh.coordinate)

    def stretch(self, layout: Layout, dim: int, length: int) -> tuple[int, int]:
        """(start, length) of what this rank holds of a dim of global `length`; raises where it is not contiguous."""
        start, position = 0, 1
        for digit in layout.digits(dim, self.mesh.shape):
            if digit.outer != position:
                raise LayoutError(f"dim {dim} lies strided as {layout}, where contiguous shards are needed")
            begin, length = Cut(dim, length, 1, digit.size).runs(self.mesh.coordinate[digit.axis])[0]
            start, position = start + begin, position * digit.size
        return start, length


LocalOp = Callable[[Any, tuple[Any, ...], dict[str, Any], LocalContext, torch.Tensor | None], Any]
