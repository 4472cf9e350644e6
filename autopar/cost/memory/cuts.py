"""A cut of a tensor as a cut of the storage behind it."""

from __future__ import annotations

import torch


def in_storage(tensor: torch.Tensor, cut: tuple[int, int], ranks: int) -> tuple[int, int]:
    """A cut of a tensor's dim as a cut of its storage: elements in the longest piece, and, where pieces are not equal,
    in what is cut into them; views of one storage that are cut alike give the same."""
    dim, outer = cut
    length, stride = tensor.shape[dim], tensor.stride(dim) if tensor.layout == torch.strided else 1
    if length % (outer * ranks):
        return -(-length // (outer * ranks)) * stride, -(-length // outer) * stride
    return length * stride // (outer * ranks), 0
