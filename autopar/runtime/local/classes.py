"""Losses over sharded classes (a vocabulary, say): what each rank computes from its own, and what is exchanged.

For each row, ranks exchange the maximum, the sum of exponentials, and the logit that the row's label (or its
distribution over classes) picks; the logits never leave their rank (Megatron-LM, 1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.local import class_sums
from autopar.runtime.local.class_part import Part
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import joined


def cross_entropy(
    part: Part,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """The loss of every row, 0 where ignored, whole on every rank: Σ t (log Σ exp x - x) over the classes.

    `t` is the row's distribution: 1 at its label (or `target` itself, if it holds probabilities), smoothed towards the
    uniform distribution, times the weights of the classes.
    """
    highest = part.highest(logits, torch.promote_types(logits.dtype, torch.float32))
    soft = target.is_floating_point()
    labels = class_sums.Labels(part, label_smoothing)
    exponentials, picked = class_sums.sums(logits, highest, target, weight, labels)
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
    loss = -class_sums.picked(scores, target, part).masked_fill(~kept, 0)
    return loss if weight is None else loss * part.looked_up(weight, target, kept)


def log_softmax(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.log_softmax`, `torch.log_softmax` and the method along a sharded dim."""
    return _log_softmax(ctx, *args, **kwargs)


def _log_softmax(
    ctx: LocalContext, input: torch.Tensor, dim: int, *arguments: Any, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    # In each form of the op, the dtype is the last argument.
    dtype = next((argument for argument in arguments if isinstance(argument, torch.dtype)), dtype)
    dim %= input.ndim
    part = Part.of(ctx, ctx.inputs[0], dim, ctx.input_shapes[0][dim])
    return class_sums.log_softmax(input, part, dtype or input.dtype)
