"""Gradients that something else holds too are copied before they become those of a parameter.

The backward of an addition passes one tensor on to both sides. As `grad` of two parameters, it would be clipped, scaled
and accumulated into twice. autograd's own `AccumulateGrad` copies such a tensor, and also one whose elements share
memory (from the backward of a sum), but it cannot see through a DTensor.
"""

from __future__ import annotations

import torch


def unshared(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or a copy if it is shared; to be called in the backward of an autograd function given it."""
    if _is_held(gradient) or any(
        step == 0 and size > 1 for step, size in zip(gradient.stride(), gradient.shape, strict=True)
    ):
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient


def added_up(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """The sum of a parameter's gradients that nobody else holds, None of none; empties the list.

    A gradient as it is stored and reduced ones come apart. Their sum is made in one of them: beside them, it would be
    the peak of a step whose largest weight is read in two layouts.
    """
    total: torch.Tensor | None = None
    while gradients:
        gradient = gradients.pop(0)
        if total is None:
            total = gradient
        elif total.layout is gradient.layout is torch.strided and total.dtype == gradient.dtype:
            total.add_(gradient)
        else:
            total = total + gradient
    return total


def _is_held(gradient: torch.Tensor) -> bool:
    """Whether others than the caller hold it, or hold its base (to which the view and `base` here are two references).

    A base with more elements does not count: its pieces are gradients of different parameters, and code that is given
    the whole base copies it.
    """
    if gradient._use_count() > 1:  # type: ignore[attr-defined]
        return True
    base = gradient._base if gradient._is_view() else None
    return base is not None and base.numel() == gradient.numel() and base._use_count() > 2  # type: ignore[attr-defined]
