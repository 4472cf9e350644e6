"""Gradients that something else holds, too, are copied before they become those of a parameter.

The backward of an addition hands one tensor on to both sides. As `grad` of two parameters it would be clipped, scaled
and accumulated into twice. autograd's own `AccumulateGrad` copies it then, and so it does where elements share memory
(the backward of a sum), but it cannot see through a DTensor.
"""

from __future__ import annotations

import torch


def own(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or a copy of it; to be asked in the backward of an autograd function that was given it."""
    if _is_held(gradient) or any(
        step == 0 and size > 1 for step, size in zip(gradient.stride(), gradient.shape, strict=True)
    ):
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient


def _is_held(gradient: torch.Tensor) -> bool:
    """Whether others than the caller hold it, or the tensor that it is a view of (which it holds, and we do here).

    Not a piece of that: pieces of one tensor are those of different parameters, and who is given the whole copies it.
    """
    if gradient._use_count() > 1:  # type: ignore[attr-defined]
        return True
    base = gradient._base if gradient._is_view() else None
    return base is not None and base.numel() == gradient.numel() and base._use_count() > 2  # type: ignore[attr-defined]
