"""Means and classification losses whose rows or classes are sharded."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.runtime.local import classes
from autopar.runtime.local.class_part import Part
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import reduced


def mean(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """A mean over dims that are cut in equal parts: this rank's summand of it.

    Axes over which the input is partial already do not count among those that cut it.
    """
    axes = zip(ctx.outputs[0].placements, ctx.inputs[0].placements, ctx.mesh.shape, strict=True)
    return target(*args, **kwargs) / math.prod([n for out, x, n in axes if out.is_partial and not x.is_partial])


def cross_entropy(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.cross_entropy` and `F.nll_loss`.

    Where rows are sharded, a mean divides by the count (or weight) of all ranks' rows that are not ignored, and
    the output is partial. Where classes are sharded (contiguously, ragged or not), see `classes`.
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
    dim = 1 if input.ndim > 1 else 0
    soft = target.is_floating_point()
    class_axes = ctx.axes_that_shard(ctx.inputs[0], dim)
    row_axes = ctx.axes_that_shard(ctx.inputs[0], *(d for d in range(input.ndim) if d != dim))
    if class_axes:
        part = Part.of(ctx, ctx.inputs[0], dim, ctx.input_shapes[0][dim])
        if function.__name__ == "nll_loss":
            loss = classes.picked(part, input, target, weight, ignore_index)
        else:
            loss = classes.cross_entropy(part, input, target, weight, ignore_index, label_smoothing)
        loss = loss if reduction == "none" else loss.sum()
    else:
        kind = "none" if reduction == "none" else "sum"
        smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
        loss = function(input, target, weight, ignore_index=ignore_index, reduction=kind, **smoothing)
    if reduction == "mean" and soft:
        loss = loss / (math.prod(ctx.input_shapes[0]) // ctx.input_shapes[0][dim])
    elif reduction == "mean":
        wide = torch.promote_types(loss.dtype, torch.float32)
        kept = target != ignore_index
        if weight is None:
            count = kept.sum(dtype=wide)
        elif class_axes:
            count = reduced(part.looked_up(weight, target, kept).sum(dtype=wide), "sum", class_axes, ctx.mesh)
        else:
            count = weight[torch.where(kept, target, 0)].masked_fill(~kept, 0).sum(dtype=wide)
        loss = loss / reduced(count, "sum", row_axes, ctx.mesh)
    return loss.to(input.dtype)
