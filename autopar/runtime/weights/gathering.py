"""Gathers a sharded tensor on rank 0 block by block: the other ranks never hold more than their part and a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.runtime.stored.pieces import Ranges, cut, ranges_at

BLOCK_BYTES = 64 << 20
"""Bytes that rank 0 receives at once, from all ranks together."""


@torch.no_grad()
def whole_on_rank_zero(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole tensor on the CPU of rank 0, None on the others; of a DTensor every rank of the mesh must call it."""
    writes = not dist.is_initialized() or dist.get_rank() == 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if writes else None
    local = tensor.to_local()
    if not any(placement.is_shard() for placement in tensor.placements):
        return local.cpu() if writes else None
    pieces, rank = _pieces_by_rank(tensor), dist.get_rank()
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if writes else None
    if not writes and rank not in pieces:
        return None
    largest = [max(ranges[dim][1] for ranges in pieces.values()) for dim in range(tensor.ndim)]
    for start, rows in _blocks(largest, len(pieces) * tensor.element_size()):
        block = local.new_zeros(rows, *largest[1:])  # pieces at the end of a ragged dim are smaller
        mine = local[start : start + rows]
        cut(block, tuple((0, length) for length in mine.shape)).copy_(mine)
        received = {source: block if source == rank else torch.empty_like(block) for source in pieces} if writes else {}
        moves = [dist.P2POp(dist.irecv, _sent(part), source) for source, part in received.items() if source != rank]
        if not writes:
            moves = [dist.P2POp(dist.isend, _sent(block), 0)]
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()
        if whole is not None:
            for source, part in received.items():
                _write_rows(whole, part, pieces[source], start)
    return whole


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as real numbers: backends do not support complex ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _write_rows(whole: torch.Tensor, part: torch.Tensor, ranges: Ranges, start: int) -> None:
    """Write the rows from `start` on of one rank's piece to their place in the whole."""
    (first, length), *others = ranges
    count = min(part.shape[0], length - start)
    if count > 0:
        filled = tuple((0, size) for _, size in others)
        cut(whole, ((first + start, count), *others)).copy_(cut(part, ((0, count), *filled)))


def _pieces_by_rank(tensor: DTensor) -> dict[int, Ranges]:
    """One rank for each piece, with the piece's ranges: of ranks that hold the same piece, the first on each axis."""
    mesh = tensor.device_mesh.mesh
    along = [range(n if p.is_shard() else 1) for p, n in zip(tensor.placements, mesh.shape, strict=True)]
    return {int(mesh[coordinate]): ranges_at(tensor, coordinate) for coordinate in itertools.product(*along)}


def _blocks(shape: Sequence[int], bytes_of_an_element: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of each block; at least one row."""
    row_bytes = bytes_of_an_element
    for length in shape[1:]:
        row_bytes *= length
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield start, min(step, shape[0] - start)
