"""Cuts of a tensor as cuts of the storage behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SUMMANDS = (-1, -1)  # in place of a cut: what the ranks of an axis hold adds up to the tensor

Cuts = tuple[tuple[int, tuple[int, int]], ...]  # by mesh axis


def in_storage(tensor: torch.Tensor, cuts: Cuts, ranks: Sequence[int], *, is_view: bool) -> Cuts:
    """Cuts of a tensor's dims as cuts of its storage, equal for views of one storage that are cut alike: elements in
    the longest piece, and, where pieces are not equal, in what is cut into them.

    `is_view`: pieces of a dim along which the tensor is expanded are views (`runtime.communication.cuts`): no cut.
    """
    found = []
    for axis, (dim, outer) in cuts:
        cut = dim, outer
        if cut != SUMMANDS:
            length, stride = tensor.shape[dim], tensor.stride(dim) if tensor.layout == torch.strided else 1
            if is_view and not stride and length > 1:
                continue
            pieces = outer * ranks[axis]
            ragged = -(-length // pieces) * stride, -(-length // outer) * stride
            cut = ragged if length % pieces else (length * stride // pieces, 0)
        found.append((axis, cut))
    return tuple(found)
