"""What Python can tell of tensors besides shapes and values: strides, and whether two are the same object."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lie_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor; None where it is contiguous (strides of dims of size 1 do not count).

    >>> lie_of(torch.empty(2, 3)), lie_of(torch.empty(3, 2).t()), lie_of(torch.empty(2, 4)[:1])
    (None, (1, 2), None)
    """
    return tensor.stride() if tensor.layout == torch.strided and not tensor.is_contiguous() else None


def repeated(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the position of its first occurrence; () in the usual case that all are different objects.

    >>> a, b = torch.ones(1), torch.ones(1)
    >>> repeated([a, b]), repeated([a, b, a])
    ((), (0, 1, 0))
    """
    # not by `id`: torch.compile would guard on it, and the next batch's tensors have other ids
    first = [next(place for place, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    return tuple(first) if len(set(first)) < len(first) else ()
