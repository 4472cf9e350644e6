"""Losses whose classes, a vocabulary say, lie on several ranks: what each finds in its own, and what is exchanged.

Pieces are contiguous, and need not be equally long. The maximum and the sum of exponentials of a row are exchanged, and
what the row's label (or its distribution over classes) picks; the logits never leave their rank (Megatron-LM,
1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.layout import Layout
from autopar.runtime.collectives import LocalMesh
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import joined, reduced, summed


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
        """What `layout` leaves this rank of `total` classes."""
        return Part(ctx.mesh, ctx.axes_that_shard(layout, dim), dim, *ctx.stretch(layout, dim, total), total)

    def holds(self, target: torch.Tensor) -> torch.Tensor:
        """Whether a label is one of these classes."""
        return (target >= self.start) & (target < self.start + self.count)

    def picked(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of every row the value of its label, 0 where another rank holds it."""
        if not self.count:
            return values.sum(self.dim)
        mine = self.holds(target)
        label = torch.where(mine, target - self.start, 0).unsqueeze(self.dim)
        return values.gather(self.dim, label).squeeze(self.dim).masked_fill(~mine, 0)

    def looked_up(self, weight: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The weight of every row's label, 0 where another rank holds it or the row is not `kept`."""
        mine = self.holds(target) & kept
        if not self.count:
            return weight.new_zeros(target.shape)
        return weight[torch.where(mine, target - self.start, 0)].masked_fill(~mine, 0)

    def along(self, weight: torch.Tensor, ndim: int) -> torch.Tensor:
        """A weight for each class in the shape that multiplies logits."""
        return weight.view(-1, *(1,) * (ndim - 1 - self.dim))

    def normaliser(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every row the maximum over all ranks, and this rank's summand of Σ exp(x - maximum)."""
        if self.count:
            highest = logits.detach().amax(self.dim)
        else:
            highest = logits.detach().sum(self.dim) - torch.inf
        highest = reduced(highest, "max", self.axes, self.mesh)
        return highest, (logits - highest.unsqueeze(self.dim)).exp().sum(self.dim)


def cross_entropy(
    part: Part,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The loss of every row, 0 where ignored, whole on every rank: Σ t (log Σ exp x - x) over the classes.

    `t` is the row's distribution: one for its label (or `target` itself, if it holds probabilities), smoothed towards
    equal ones, times the class' weight.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest, exponentials = part.normaliser(logits)
    soft = target.is_floating_point()
    weighted = logits if weight is None else logits * part.along(weight, logits.ndim)
    picked = (target * weighted).sum(part.dim) if soft else part.picked(weighted, target)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * (weighted.sum(part.dim) / part.total)
    summands = [exponentials, picked]
    if soft or weight is not None:
        summands.append(_mass(part, target, weight, label_smoothing, ignore_index).to(picked.dtype))
    exponentials, picked, *mass = joined(torch.stack(summands), part.axes, part.mesh).unbind()
    whole = exponentials.log() + highest
    loss = (whole * mass[0] if mass else whole) - picked
    return loss if soft else loss.masked_fill(target == ignore_index, 0)


def _mass(
    part: Part, target: torch.Tensor, weight: torch.Tensor | None, label_smoothing: float, ignore_index: int
) -> torch.Tensor:
    """This rank's summand of Σ t for every row."""
    if target.is_floating_point():
        mass = (target if weight is None else target * part.along(weight, target.ndim)).sum(part.dim)
    else:
        assert weight is not None
        mass = part.looked_up(weight, target, target != ignore_index)
    if not label_smoothing:
        return mass
    every = part.count if weight is None else weight.sum()
    return (1 - label_smoothing) * mass + label_smoothing * (every / part.total)


def picked(
    part: Part, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """`F.nll_loss` of every row: this rank's summand, 0 where ignored or where another rank holds the label."""
    kept = target != ignore_index
    loss = -part.picked(scores, target).masked_fill(~kept, 0)
    return loss if weight is None else loss * part.looked_up(weight, target, kept)


def log_softmax(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.log_softmax`, `torch.log_softmax` and the method along a dim that lies on several ranks."""
    return _log_softmax(ctx, *args, **kwargs)


def _log_softmax(
    ctx: LocalContext, input: torch.Tensor, dim: int, *rest: Any, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    dtype = next((given for given in rest if isinstance(given, torch.dtype)), dtype)  # in the last place of each form
    dim %= input.ndim
    part = Part.of(ctx, ctx.inputs[0], dim, ctx.input_shapes[0][dim])
    result = dtype or input.dtype
    logits = input.to(torch.promote_types(result, torch.float32))
    highest, exponentials = part.normaliser(logits)
    whole = summed(exponentials, part.axes, part.mesh).log() + highest
    return (logits - whole.unsqueeze(dim)).to(result)
