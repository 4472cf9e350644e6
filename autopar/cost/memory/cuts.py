"""How a sharded tensor is cut, in terms of the storage behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SUMMANDS = (-1, -1)  # in place of a cut: the ranks of an axis hold partial sums of the tensor

Cuts = tuple[tuple[int, tuple[int, int]], ...]  # mesh axes, each with its cut


def in_storage(tensor: torch.Tensor, cuts: Cuts, ranks: Sequence[int], *, is_view: bool) -> Cuts:
    """Cuts of a tensor's dims (dim, digit) as cuts of its storage, equal for views that cut a storage alike: the
    storage elements that the longest piece spans and, if pieces are unequal, those that what is cut spans (else 0).

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
