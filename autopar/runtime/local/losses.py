"""Losses and means whose rows, or classes, lie on several ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.errors import LayoutError
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import joined, reduced


def mean(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """A mean over dims that are cut in equal parts: this rank's summand of it.

    Axes over which the input is a summand already are not among those that cut it.
    """
    axes = zip(ctx.outputs[0].placements, ctx.inputs[0].placements, ctx.mesh.shape, strict=True)
    return target(*args, **kwargs) / math.prod([n for out, x, n in axes if out.is_partial and not x.is_partial])


def cross_entropy(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.cross_entropy` of class indices, or `F.nll_loss`, whose classes are whole.

    Where rows are sharded, a mean divides by the count (or weight) of all ranks' rows that are not ignored, and
    the output is partial. Where classes are sharded (contiguously, ragged or not), the maximum, the sum of
    exponentials and the label's logit are exchanged, and every rank has the loss.
    """
    return _cross_entropy(ctx, target, *args, **kwargs)


def _cross_entropy(
    ctx: LocalContext,
    function: Any,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    classes = 1 if input.ndim > 1 else 0
    class_axes = ctx.axes_that_shard(ctx.inputs[0], classes)
    row_axes = ctx.axes_that_shard(ctx.inputs[1], *range(target.ndim))
    if class_axes:
        if weight is not None:
            raise LayoutError("cross_entropy with class weights cannot have its classes sharded")
        loss = _of_sharded_classes(ctx, class_axes, input, target, classes, ignore_index, label_smoothing)
        loss = loss if reduction == "none" else loss.sum()
    else:
        kind = "none" if reduction == "none" else "sum"
        smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
        loss = function(input, target, weight, ignore_index=ignore_index, reduction=kind, **smoothing)
    if reduction == "mean":
        kept = target != ignore_index
        wide = torch.promote_types(loss.dtype, torch.float32)
        if weight is None:
            count = kept.sum(dtype=wide)
        else:
            count = weight[torch.where(kept, target, 0)].masked_fill(~kept, 0).sum(dtype=wide)
        loss = loss / reduced(count, "sum", row_axes, ctx.mesh)
    return loss.to(input.dtype)


def _of_sharded_classes(
    ctx: LocalContext,
    axes: tuple[int, ...],
    logits: torch.Tensor,
    target: torch.Tensor,
    dim: int,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The loss of every row, 0 where ignored: log Σ exp(x - m) + m - x[label], smoothed towards the mean logit."""
    total = ctx.input_shapes[0][dim]
    start, count = ctx.stretch(ctx.inputs[0], dim, total)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if count:
        highest = logits.detach().amax(dim)
        mine = (target >= start) & (target < start + count)
        label = torch.where(mine, target - start, 0).unsqueeze(dim)
        picked = logits.gather(dim, label).squeeze(dim).masked_fill(~mine, 0)
    else:
        highest, picked = logits.new_full(target.shape, -torch.inf), logits.sum(dim)
    highest = reduced(highest, "max", axes, ctx.mesh)
    if label_smoothing:
        picked = (1 - label_smoothing) * picked + label_smoothing * (logits.sum(dim) / total)
    exponentials = (logits - highest.unsqueeze(dim)).exp().sum(dim)
    exponentials, picked = joined(torch.stack((exponentials, picked)), axes, ctx.mesh).unbind()
    return (exponentials.log() + highest - picked).masked_fill(target == ignore_index, 0)
