"""Sums of a loss over the classes of one rank, whose gradients backward writes into one tensor.

With plain autograd, each sum would save a tensor of the logits' size and give a gradient of that size, and the
gradients would be added up. Here all sums share one saved tensor and one gradient (as in Megatron-LM, 1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.gradients.second_derivatives import refuses_second
from autopar.runtime.local.class_part import Part
from autopar.runtime.local.exchange import reduced

_WHOLE_CLASSES = "pin the logits so that their classes are not split"


@dataclass(frozen=True)
class Labels:
    """How labels are read: for the classes of `part`, with `smoothing` towards the uniform distribution."""

    part: Part
    smoothing: float = 0.0

    def row(self, values: torch.Tensor) -> torch.Tensor:
        """A number for each row, shaped to broadcast against logits."""
        return values.unsqueeze(self.part.dim)


class _Sums(torch.autograd.Function):
    """For every row, Σ exp(x - highest), and Σ t x with the row's distribution `t` over classes."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        highest: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        labels: Labels,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part, soft = labels.part, target.is_floating_point()
        weighted = (
            logits if weight is None or not (soft or labels.smoothing) else logits * part.along(weight, logits.ndim)
        )
        if soft:
            picked = (target * weighted).sum(part.dim, dtype=highest.dtype)
        else:
            picked = _picked(part, logits, target).to(highest.dtype)
            picked = picked if weight is None else picked * part.looked_up(weight, target)
        if labels.smoothing:
            even = weighted.sum(part.dim, dtype=highest.dtype) / part.total
            picked = (1 - labels.smoothing) * picked + labels.smoothing * even
        del weighted
        exponentials = (logits - labels.row(highest)).exp_()
        ctx.labels = labels
        ctx.save_for_backward(
            exponentials.to(logits.dtype), target, weight, logits if soft and ctx.needs_input_grad[2] else None
        )
        return as_output(exponentials.sum(part.dim)), as_output(picked.to(highest.dtype))

    @staticmethod
    @refuses_second("cross entropy", _WHOLE_CLASSES)
    def backward(
        ctx: Any, of_exponentials: torch.Tensor, of_picked: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor | None, None, None]:
        exponentials, target, weight, logits = ctx.saved_tensors
        labels: Labels = ctx.labels
        part, row, own = labels.part, labels.row, (1 - labels.smoothing) * of_picked
        each = None if weight is None else part.along(weight, exponentials.ndim)
        gradient = exponentials * row(of_exponentials)
        of_target = None
        if target.is_floating_point():
            gradient.addcmul_(target if each is None else target * each, row(own))
            if logits is not None:
                of_target = ((logits if each is None else logits * each) * row(own)).to(target.dtype)
        elif part.count:
            own = own.masked_fill(~part.holds(target), 0)
            own = own if weight is None else own * weight[part.place(target)]
            gradient.scatter_add_(part.dim, row(part.place(target)), row(own.to(gradient.dtype)))
        if labels.smoothing:
            even = row(of_picked * (labels.smoothing / part.total))
            gradient = gradient.add_(even) if each is None else gradient.addcmul_(even, each)
        return gradient.to(exponentials.dtype), None, of_target, None, None


def sums(
    logits: torch.Tensor,
    highest: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    labels: Labels,
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's summands of Σ exp(x - highest) and of Σ t x, in the dtype of `highest`.

    `t` is as in `classes.cross_entropy`. What is saved has the dtype of the logits, as in the unsharded op.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _Sums.apply(logits, highest, target, weight, labels)
    return result


def _picked(part: Part, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if not part.count:
        return values.sum(part.dim)
    values_at_labels = values.gather(part.dim, part.place(target).unsqueeze(part.dim)).squeeze(part.dim)
    return values_at_labels.masked_fill(~part.holds(target), 0)


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, target: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part, ctx.shape = part, values.shape
        ctx.save_for_backward(target)
        return as_output(_picked(part, values, target))

    @staticmethod
    @refuses_second("nll_loss", _WHOLE_CLASSES)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [target], part = ctx.saved_tensors, ctx.part
        result = gradient.new_zeros(ctx.shape)
        if part.count:
            own = gradient.masked_fill(~part.holds(target), 0)
            result.scatter_(part.dim, part.place(target).unsqueeze(part.dim), own.unsqueeze(part.dim))
        return result, None, None


def picked(values: torch.Tensor, target: torch.Tensor, part: Part) -> torch.Tensor:
    """For every row, the value at its label; 0 where another rank holds it."""
    result: torch.Tensor = _Picked.apply(values, target, part)
    return result


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
        highest = part.highest(logits, torch.promote_types(dtype, torch.float32))
        exponentials = (logits - highest.unsqueeze(part.dim)).exp_().sum(part.dim)
        whole = reduced(exponentials, "sum", part.axes, part.mesh).log() + highest
        result = (logits - whole.unsqueeze(part.dim)).to(dtype)
        ctx.part, ctx.dtype = part, logits.dtype
        ctx.save_for_backward(result)
        return as_output(result)

    @staticmethod
    @refuses_second("log_softmax", _WHOLE_CLASSES)
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [result], part = ctx.saved_tensors, ctx.part
        wide = torch.promote_types(result.dtype, torch.float32)
        sum_of_gradient = reduced(gradient.sum(part.dim, dtype=wide), "sum", part.axes, part.mesh).neg_()
        own = result.exp() if result.dtype == wide else result.to(wide).exp_()
        return own.mul_(sum_of_gradient.unsqueeze(part.dim)).add_(gradient).to(ctx.dtype), None, None


def log_softmax(logits: torch.Tensor, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """x - log Σ exp x over the classes of all ranks; saves only its result for backward."""
    result: torch.Tensor = _LogSoftmax.apply(logits, part, dtype)
    return result
