"""How one mesh axis cuts one dim of a local tensor: taking a piece, and putting pieces together.

Seen from one axis, the other axes have already cut the tensor. What remains is one digit of one dim (`autopar.layout`,
Digits): the length that the axis finds, the axis's `outer` within that length, and its number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.layout import Layout, R


@dataclass(frozen=True)
class Cut:
    """An axis of `ranks` ranks cuts a dim of `length` at digit position `outer`; ragged only where `outer` is 1.

    >>> cut = Cut(dim=0, length=12, outer=3, ranks=2)
    >>> cut.take(torch.arange(12), 1)
    tensor([ 2,  3,  6,  7, 10, 11])
    >>> cut.runs(1)
    [(2, 2), (6, 2), (10, 2)]
    """

    dim: int
    length: int
    outer: int
    ranks: int

    @staticmethod
    def of(
        layout: Layout, axis: int, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> Cut:
        """The cut of `axis` in a tensor of global `shape` and `layout`, at `coordinate` on the other axes."""
        placement = layout[axis]
        others = layout.replace(axis, R)
        length = others.local_shape(shape, mesh_shape, coordinate)[placement.dim]
        digits = others.digits(placement.dim, mesh_shape)
        outer = placement.outer // math.prod(d.size for d in digits if d.outer < placement.outer)
        return Cut(placement.dim, length, outer, mesh_shape[axis])

    @property
    def longest(self) -> int:
        """Length of the first rank's piece, to which ragged pieces are padded."""
        return -(-self.length // self.ranks)

    @property
    def is_ragged(self) -> bool:
        return self.length % self.ranks != 0

    @property
    def _part(self) -> int:
        return self.length // (self.outer * self.ranks)

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """The piece of `rank` as (start, length) of its contiguous stretches."""
        if self.outer == 1:
            start = min(rank * self.longest, self.length)
            return [(start, min(self.longest, self.length - start))]
        stride = self.ranks * self._part
        return [(k * stride + rank * self._part, self._part) for k in range(self.outer)]

    def count(self, rank: int) -> int:
        """Length of the piece of `rank`."""
        return sum(length for _, length in self.runs(rank))

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The piece of `rank`, a view where the strides allow it."""
        if self.outer == 1:
            return tensor.narrow(self.dim, *self.runs(rank)[0])
        digits = torch.unflatten(tensor, self.dim, (self.outer, self.ranks, self._part))
        return digits.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)

    def repeats(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is expanded (stride 0) along the dim: a view of a piece then holds no more than a copy."""
        if tensor.stride(self.dim) or torch.compiler.is_compiling():  # a compiler's storages are not real
            return False
        piece = tensor.numel() // self.length * self.longest
        return tensor.untyped_storage().nbytes() <= piece * tensor.element_size()

    def copy(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The piece of `rank` in new memory, copied once."""
        if self.outer == 1:
            return self.take(tensor, rank).clone(memory_format=torch.contiguous_format)
        digits = torch.unflatten(tensor, self.dim, (self.outer, self.ranks, self._part)).select(self.dim + 1, rank)
        return digits.clone(memory_format=torch.contiguous_format).flatten(self.dim, self.dim + 1)

    def put(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """The whole with `piece` in its place and zeros elsewhere."""
        whole = piece.new_zeros((*piece.shape[: self.dim], self.length, *piece.shape[self.dim + 1 :]))
        if self.outer == 1:
            whole.narrow(self.dim, *self.runs(rank)[0]).copy_(piece)
        else:
            digits = torch.unflatten(whole, self.dim, (self.outer, self.ranks, self._part))
            digits.select(self.dim + 1, rank).copy_(torch.unflatten(piece, self.dim, (self.outer, self._part)))
        return whole

    def assemble(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from the pieces of all ranks."""
        if self.outer == 1:
            return torch.cat(list(pieces), self.dim)
        shape = pieces[0].shape
        whole = pieces[0].new_empty((*shape[: self.dim], self.length, *shape[self.dim + 1 :]))
        digits = torch.unflatten(whole, self.dim, (self.outer, self.ranks, self._part))
        for rank, piece in enumerate(pieces):
            digits.select(self.dim + 1, rank).copy_(torch.unflatten(piece, self.dim, (self.outer, self._part)))
        return whole

    def pad(self, piece: torch.Tensor) -> torch.Tensor:
        """A ragged piece, filled up with zeros to the longest."""
        missing = self.longest - piece.shape[self.dim]
        if missing == 0:
            return piece
        zeros = piece.new_zeros((*piece.shape[: self.dim], missing, *piece.shape[self.dim + 1 :]))
        return torch.cat((piece, zeros), self.dim)

    def stack(self, whole: torch.Tensor) -> torch.Tensor:
        """All pieces of `whole`, padded to the longest, along a new leading dim."""
        if self.is_ragged:  # straight into the send buffer: padding the pieces first would be one more copy
            pieces = whole.new_zeros((self.ranks, *whole.shape[: self.dim], self.longest, *whole.shape[self.dim + 1 :]))
            for rank, piece in enumerate(pieces):
                piece.narrow(self.dim, 0, self.count(rank)).copy_(self.take(whole, rank))
            return pieces
        if self.outer == 1:
            return torch.unflatten(whole, self.dim, (self.ranks, self.longest)).movedim(self.dim, 0)
        digits = torch.unflatten(whole, self.dim, (self.outer, self.ranks, self._part))
        return digits.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 2)

    def unstack(self, pieces: torch.Tensor) -> torch.Tensor:
        """The inverse of `stack`: a view where the strides of equal pieces allow it, else copied once."""
        if self.is_ragged:
            return torch.cat([piece.narrow(self.dim, 0, self.count(r)) for r, piece in enumerate(pieces)], self.dim)
        if self.outer == 1:
            return pieces.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        digits = torch.unflatten(pieces, self.dim + 1, (self.outer, self._part))
        return digits.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True)
class Regrouping:
    """From pieces cut by `src` to pieces cut by `dst` along one axis: an all-to-all of blocks.

    The block that rank s sends to rank d holds the elements that are in the piece of s under `src` and in the piece of
    d under `dst`, in index order.
    """

    src: Cut
    dst: Cut

    def blocks(self, piece: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The blocks that `rank` sends, one for each rank."""
        ranks = range(self.dst.ranks)
        if self.src.dim != self.dst.dim:
            return [self.dst.take(piece, r) for r in ranks]
        return [_stretches(piece, self.src.dim, _common(self.src.runs(rank), self.dst.runs(r))) for r in ranks]

    def block_shape(self, shape: Sequence[int], sender: int, receiver: int) -> tuple[int, ...]:
        """Shape of a block; `shape` is that of any piece before or after."""
        block = list(shape)
        if self.src.dim == self.dst.dim:
            block[self.src.dim] = sum(n for _, n, _ in _common(self.src.runs(sender), self.dst.runs(receiver)))
        else:
            block[self.src.dim], block[self.dst.dim] = self.src.count(sender), self.dst.count(receiver)
        return tuple(block)

    def packed(self, piece: torch.Tensor, rank: int) -> torch.Tensor:
        """The blocks that `rank` sends, one after another in 1-D: a view if strides allow it, else copied once."""
        if self.src.dim != self.dst.dim and not self.dst.is_ragged:
            return self.dst.stack(piece).reshape(-1)
        flat = piece.new_empty(piece.numel())
        shapes = [self.block_shape(piece.shape, rank, receiver) for receiver in range(self.dst.ranks)]
        blocks = flat.split([math.prod(shape) for shape in shapes])
        for receiver, (block, shape) in enumerate(zip(blocks, shapes, strict=True)):
            filled = 0
            for stretch in self._stretches(piece, rank, receiver):
                length = stretch.shape[self.dst.dim]
                block.view(shape).narrow(self.dst.dim, filled, length).copy_(stretch)
                filled += length
        return flat

    def _stretches(self, piece: torch.Tensor, rank: int, receiver: int) -> list[torch.Tensor]:
        """Views of `piece` that together are the block for `receiver`; a single one where the dims differ."""
        if self.src.dim != self.dst.dim:
            return [self.dst.take(piece, receiver)]
        common = _common(self.src.runs(rank), self.dst.runs(receiver))
        return [piece.narrow(self.src.dim, start, length) for start, length, _ in common]

    def join(self, blocks: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The piece of `rank` under `dst` from the blocks that all ranks sent to it, copied once."""
        if self.src.dim != self.dst.dim:
            return self.src.assemble(blocks)
        arrived: list[tuple[int, torch.Tensor]] = []  # index in the whole, stretch
        for sender, block in enumerate(blocks):
            read = 0
            for _, length, index in _common(self.src.runs(sender), self.dst.runs(rank)):
                arrived.append((index, block.narrow(self.src.dim, read, length)))
                read += length
        stretches = [stretch for _, stretch in sorted(arrived, key=lambda item: item[0])]
        return torch.cat(stretches or list(blocks), self.src.dim)


def _common(mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Where the runs of `theirs` overlap the piece made of `mine`: (start in the piece, length, index in the whole)."""
    overlaps, offset = [], 0
    for start, length in mine:
        for other, other_length in theirs:
            begin, end = max(start, other), min(start + length, other + other_length)
            if begin < end:
                overlaps.append((offset + begin - start, end - begin, begin))
        offset += length
    return overlaps


def _stretches(tensor: torch.Tensor, dim: int, runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    parts = [tensor.narrow(dim, start, length) for start, length, _ in runs]
    if len(parts) == 1:  # a view
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)
