"""What Python can tell of tensors beside their shapes and values: how they lie in memory, and which of them are one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lie_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor; None where it is contiguous, whatever they are along dims of one element.

    >>> lie_of(torch.empty(2, 3)), lie_of(torch.empty(3, 2).t()), lie_of(torch.empty(2, 4)[:1])
    (None, (1, 2), None)
    """
    return tensor.stride() if tensor.layout == torch.strided and not tensor.is_contiguous() else None


def repeated(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the place at which it came first; () where all are different ones, as nearly always.

    >>> a, b = torch.ones(1), torch.ones(1)
    >>> repeated([a, b]), repeated([a, b, a])
    ((), (0, 1, 0))
    """
    # not by `id`, which torch.compile would guard: the next batch's tensors have others
    first = [next(place for place, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    return tuple(first) if len(set(first)) < len(first) else ()
