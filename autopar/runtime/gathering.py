"""A sharded tensor whole on rank 0, block by block: no other rank ever has more than its part and a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.runtime.pieces import Ranges, cut, ranges_at

BLOCK_BYTES = 64 << 20
"""What rank 0 receives at once from all ranks together."""


@torch.no_grad()
def whole_on_rank_zero(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole tensor on the CPU of rank 0, None on the others; of a DTensor every rank of the mesh must call it."""
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if writes else None
    held = tensor.to_local()
    if not any(placement.is_shard() for placement in tensor.placements):
        return held.cpu() if writes else None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if writes else None
    places = _ranges_by_rank(tensor)
    largest = [max(ranges[dim][1] for ranges in places) for dim in range(tensor.ndim)]
    for start, rows in _blocks(largest, len(places) * tensor.element_size()):
        block = held.new_zeros(rows, *largest[1:])  # pieces at the end of a ragged dim are smaller
        mine = held[start : start + rows]
        cut(block, tuple((0, length) for length in mine.shape)).copy_(mine)
        received = [torch.empty_like(block) for _ in places] if writes else None
        dist.gather(block, received, dst=0)
        if whole is not None and received is not None:
            for ranges, part in zip(places, received, strict=True):
                _put(whole, part, ranges, start)
    return whole


def _put(whole: torch.Tensor, part: torch.Tensor, ranges: Ranges, start: int) -> None:
    """The rows from `start` on of one rank's piece, in their place."""
    (first, length), *others = ranges
    count = min(part.shape[0], length - start)
    if count > 0:
        filled = tuple((0, size) for _, size in others)
        cut(whole, ((first + start, count), *others)).copy_(cut(part, ((0, count), *filled)))


def _ranges_by_rank(tensor: DTensor) -> list[Ranges]:
    """What each rank holds, by its number; the mesh is of all ranks."""
    mesh = tensor.device_mesh.mesh
    found: dict[int, Ranges] = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        found[int(mesh[coordinate])] = ranges_at(tensor, coordinate)
    return [found[rank] for rank in range(len(found))]


def _blocks(shape: Sequence[int], bytes_of_an_element: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block; at least one row."""
    row_bytes = bytes_of_an_element
    for length in shape[1:]:
        row_bytes *= length
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield start, min(step, shape[0] - start)
