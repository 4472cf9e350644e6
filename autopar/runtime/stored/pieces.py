"""The piece of a stored tensor that a rank holds: its ranges in the whole, and making a stored tensor of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

Ranges = tuple[tuple[int, int], ...]
"""First index and number of indices for each dim."""


def ranges_of(tensor: torch.Tensor) -> Ranges:
    """Which part of the whole this rank holds: all of a plain tensor, a block of a DTensor."""
    if not isinstance(tensor, DTensor):
        return tuple((0, length) for length in tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return ranges_at(tensor, coordinate)


def ranges_at(tensor: DTensor, coordinate: Sequence[int]) -> Ranges:
    """The same for the rank at `coordinate` of the mesh.

    Each axis in turn cuts what the axes before it have left, into pieces of equal length except for the last ones.
    """
    ranges = [(0, length) for length in tensor.shape]
    for placement, ranks, mine in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            start, length = ranges[placement.dim]
            step = -(-length // ranks)
            begin = min(mine * step, length)
            ranges[placement.dim] = start + begin, min(step, length - begin)
    return tuple(ranges)


def cut(whole: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """A view of the part.

    >>> cut(torch.arange(12).view(3, 4), ((1, 2), (0, 2)))
    tensor([[4, 5],
            [8, 9]])
    """
    for dim, (start, length) in enumerate(ranges):
        whole = whole.narrow(dim, start, length)
    return whole


def stored_as(like: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """A tensor in the layout and dtype of `like`, of which this rank holds `piece`."""
    piece = piece.to(like.dtype)
    if not isinstance(like, DTensor):
        return piece
    return DTensor.from_local(
        piece.contiguous(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
