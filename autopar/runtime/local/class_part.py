"""The classes of a loss that one rank holds where they (a vocabulary, say) are sharded, and labels among them.

Pieces are contiguous, and may differ in length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.layout import Layout
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import reduced


@dataclass(frozen=True)
class Part:
    """The classes of this rank: `count` of `total` from `start` on, along `dim` of the logits, cut by `axes`."""

    mesh: LocalMesh
    axes: tuple[int, ...]
    dim: int
    start: int
    count: int
    total: int

    @staticmethod
    def of(ctx: LocalContext, layout: Layout, dim: int, total: int) -> Part:
        """The part of `total` classes that `layout` gives this rank."""
        return Part(ctx.mesh, ctx.axes_that_shard(layout, dim), dim, *ctx.stretch(layout, dim, total), total)

    def holds(self, target: torch.Tensor) -> torch.Tensor:
        """Whether a label is one of these classes."""
        return (target >= self.start) & (target < self.start + self.count)

    def place(self, target: torch.Tensor) -> torch.Tensor:
        """The index of a label among these classes; 0 if another rank holds it."""
        return torch.where(self.holds(target), target - self.start, 0)

    def looked_up(self, weight: torch.Tensor, target: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """The weight of every row's label; 0 where another rank holds the label or the row is not `kept`."""
        if not self.count:
            return weight.new_zeros(target.shape)
        mine = self.holds(target)
        return weight[self.place(target)].masked_fill(~(mine if kept is None else mine & kept), 0)

    def along(self, weight: torch.Tensor, ndim: int) -> torch.Tensor:
        """A weight for each class, shaped to broadcast against logits."""
        return weight.view(-1, *(1,) * (ndim - 1 - self.dim))

    def highest(self, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The maximum of every row over the classes of all ranks; no gradient goes through it."""
        logits = logits.detach()
        highest = logits.amax(self.dim) if self.count else logits.sum(self.dim) - torch.inf
        return reduced(highest.to(dtype), "max", self.axes, self.mesh)
