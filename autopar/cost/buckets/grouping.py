"""Which parameters may share buckets, and what part of a bucket each is charged, from the graph alone (before layouts
are chosen). `cost.buckets.buckets` says what a bucket is.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import fx

from autopar.cost.buckets.readers import Readers
from autopar.cost.buckets.size import LEAST_PART, TINY_PART
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Region, Repeat, regions
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout

if TYPE_CHECKING:
    from autopar.cost.memory.forward_part import ForwardPart
    from autopar.cost.memory.transfer_bytes import TransferBytes


@dataclass(frozen=True)
class Stretch:
    """The blocks of one repeat, or the nodes between two repeats: `count` groups of `together` neighbouring blocks,
    whose parameters fill `buckets` buckets each. `first`: the position of its first node."""

    first: int
    count: int
    buckets: int
    together: int = 1


class Grouping:
    """What is known of buckets from the graph alone, whatever strategies are chosen. A region is a block of a repeat,
    or the nodes between two repeats (`cost.structure.blocks.regions`)."""

    def __init__(self, memory: StepMemory, repeats: Sequence[Repeat]) -> None:
        self._memory, self.repeats, self.full_bytes = memory, tuple(repeats), memory.bucket_bytes
        rows = regions(len(memory.graph.nodes), repeats)
        self.readers = Readers(memory, rows)
        self._forms: dict[TensorRef, tuple[object, ...]] = {}
        self.transfers: dict[tuple[object, ...], TransferBytes] = {}  # a cache of `cost.memory.transfer_bytes`
        self._divided: dict[frozenset[int], Grouping] = {}
        self.stretches: list[Stretch] = []
        self._parts: dict[fx.Node, float] = {}  # of a bucket's latency, for parameters that one region reads
        # Each of these has one entry for each region.
        self._stretch: list[int] = []
        self._group: list[tuple[int, int]] = []
        self._share: list[float] = []  # bytes of a full bucket, over those of the region's parameters
        self._buckets: list[float] = []  # buckets over regions in the stretch: 1, or less where blocks share buckets
        self._sizes: list[float] = []  # the most bytes of one bucket, unless a parameter is larger
        for row, own in zip(rows, self.readers.own, strict=True):
            self._fill(row, own)
        self._read_bytes = [self._bytes_read(*pair) for pair in zip(self.readers.saved, self._share, strict=True)]

    def _fill(self, row: Region, own: Sequence[fx.Node]) -> None:
        """Divide the parameters that only one region reads, its `own`, into buckets; regions come in order."""
        sizes = [_whole_bytes(parameter) for parameter in own]
        total, full = sum(sizes) or 1, max(self.full_bytes, min(self._memory.most_bucket_bytes, max(sizes, default=0)))
        blocks = self.repeats[row.repeat].count if row.repeat is not None else 1
        if row.instance == 0:
            together = min(blocks, max(1, int(LEAST_PART * self.full_bytes) // total))
            self.stretches.append(Stretch(row.first, -(-blocks // together), max(1, total // full), together))
        stretch = self.stretches[-1]
        self._stretch.append(len(self.stretches) - 1)
        self._group.append((len(self.stretches) - 1, row.instance // stretch.together))
        self._share.append(stretch.together / stretch.buckets)
        self._buckets.append(stretch.count / blocks)
        self._sizes.append(max(full, total / stretch.buckets))
        for parameter, size in zip(own, sizes, strict=True):
            self._parts[parameter] = size / total * stretch.count / blocks

    def _bytes_read(self, saved: Set[fx.Node], share: float) -> int:
        sizes = [_whole_bytes(parameter) for parameter in saved]
        size = round(sum(sizes) * share)
        # A large parameter may be a bucket by itself; in a backward its gradients count beside it.
        return size if self._memory.train else max(size, max(sizes, default=0))

    def shares(self, region: int) -> bool:
        """Whether a region's parameters share buckets with those of equal blocks, and no other region reads any of the
        parameters that it saves."""
        return self._share[region] > 1.0 and not self.readers.saves_shared(region)

    def divided(self, apart: Set[int]) -> Grouping:
        """The grouping where the regions `apart` are recomputed: those of them that otherwise share buckets (whole
        groups of them, see `together`) have buckets of their own."""
        apart = frozenset(filter(self.shares, apart))
        if not apart:
            return self
        if apart not in self._divided:
            other = self._divided[apart] = copy.copy(self)
            other._forms = {}
            other._group, other._share, other._read_bytes = list(self._group), list(self._share), list(self._read_bytes)
            for region in range(len(self._group)):
                sharing = self.together(region)
                left = [region] if region in apart else [i for i in sharing if i not in apart]
                other._group[region] = self._stretch[region], left[0]
                if region in apart or len(left) < len(sharing):
                    other._share[region] = float(len(left))
                    other._read_bytes[region] = round(self._read_bytes[region] / self._share[region] * len(left))
        return self._divided[apart]

    @cached_property
    def forward(self) -> ForwardPart | None:
        """The forward of a training step, if the step's peak may be there."""
        from autopar.cost.memory.forward_part import forward_part  # imported here, since it imports this module

        return forward_part(self._memory, self)

    @property
    def regions(self) -> int:
        """The number of regions."""
        return len(self._group)

    def region(self, node: fx.Node) -> int:
        """The number of the region that a node lies in."""
        return self.readers.region(node)

    def group(self, node: fx.Node, segment: int) -> tuple[int, int]:
        """A key that is equal for nodes whose parameters may share buckets; in a recomputed `segment` (not -1) only
        those of the same block may."""
        region = self.region(node)
        return (-1, region) if segment >= 0 else self._group[region]

    def shared(self, parameter: fx.Node) -> bool:
        """Whether several regions read a parameter."""
        return self.readers.shared(parameter)

    def share(self, region: int, other: int) -> bool:
        """Whether two regions both save the same parameter."""
        return self.readers.share(region, other)

    def home(self, parameter: fx.Node) -> int:
        """The region whose buckets a parameter is in: the first that reads it."""
        return self.readers.home(parameter)

    def read_bytes(self, region: int) -> int:
        """The bytes of one of a region's buckets that ops save, if nothing is sharded."""
        return self._read_bytes[region]

    def begins(self, region: int) -> bool:
        """Whether a region is the first of those that share buckets: after its backward these are reduced."""
        return region == 0 or self._group[region - 1] != self._group[region]

    def goes_on(self, region: int) -> bool:
        """Whether the next region shares this one's buckets."""
        return region + 1 < len(self._group) and self._group[region + 1] == self._group[region]

    def together(self, region: int) -> range:
        """The regions that share a region's buckets, itself among them."""
        mine = self._group[region]
        return range(bisect_left(self._group, mine), bisect_right(self._group, mine))

    def is_cut(self, region: int) -> bool:
        """Whether a region's parameters are cut into several buckets."""
        return self.stretches[self._stretch[region]].buckets > 1

    def alone(self, ref: TensorRef, wanted: Layout) -> float:
        """The size of a bucket of this parameter alone, as `wanted`, over the part of a bucket that it is charged
        (`one_of_bucket`). More than 1 only if the region has several buckets and the parameter is larger than its part
        of each."""
        taken = self.one_of_bucket(ref, wanted, 1)
        local = self._memory.local_bytes(ref, wanted) // tensor_of(ref).dtype.itemsize
        return local / taken if taken and self.is_cut(self.home(ref.node)) else 1.0

    def is_alike(self, region: int, other: int) -> bool:
        """Whether two regions are in one stretch, and their buckets are shared by equally many blocks."""
        return (self._stretch[region], self._share[region]) == (self._stretch[other], self._share[other])

    def before(self, region: int) -> int | None:
        """The last region before this one that does not share its buckets."""
        return next((i for i in range(region - 1, -1, -1) if self._group[i] != self._group[region]), None)

    def after(self, region: int) -> int | None:
        """The first region after this one that does not share its buckets."""
        return next((i for i in range(region + 1, len(self._group)) if self._group[i] != self._group[region]), None)

    def stretch(self, node: fx.Node) -> int:
        """The number of the stretch that a node lies in; for a parameter, of the one that reads it first."""
        return self._stretch[self.home(node) if self._memory.is_parameter(node) else self.region(node)]

    def stretch_of(self, region: int) -> int:
        """The number of the stretch that a region's ops lie in."""
        return self._stretch[region]

    def bucket_of(self, parameter: fx.Node) -> tuple[float, float]:
        """The least part of a bucket's latency that a parameter is charged (1 if several regions read it); and the most
        bytes of one of its region's buckets, unless a parameter is larger."""
        return self._parts.get(parameter, 1.0), self._sizes[self.home(parameter)]

    def buckets(self, region: int) -> float:
        """How many buckets a region's parameters fill if all move in the same way: 1, or less if several blocks share
        buckets."""
        return self._buckets[region]

    def in_one_block(self, parameter: fx.Node) -> bool:
        """Whether only one region reads a parameter, the one in which its node lies."""
        return not self.shared(parameter) and self.home(parameter) == self.region(parameter)

    def is_tiny(self, ref: TensorRef, wanted: Layout) -> bool:
        """Whether a parameter that is not gathered is, as `wanted`, small enough to be reduced in one bucket with those
        of other blocks (`cost.buckets.tiny`)."""
        return self._memory.local_bytes(ref, wanted) <= TINY_PART * self.full_bytes

    def calls(self, ref: TensorRef, wanted: Layout) -> float:
        """The number of collectives that the conversion of a parameter is charged, mostly less than one."""
        part, size = self.bucket_of(ref.node)
        return max(part, min(1.0, self._memory.local_bytes(ref, wanted) / size))

    def form(self, ref: TensorRef) -> tuple[object, ...]:
        """A key that is equal for parameters whose conversions between equal layouts hold equally many bytes."""
        form = self._forms.get(ref)
        if form is None:
            tensor, memory, node = tensor_of(ref), self._memory, ref.node
            kinds = tensor.dtype, memory.stored_dtype(node), memory.is_trainable(node), tensor.requires_grad
            form = self._forms[ref] = (tuple(tensor.shape), *kinds, self._share_of(node))
        return form

    def bucket_bytes(self, ref: TensorRef, wanted: Layout, itemsize: int) -> int:
        """The bytes that this parameter and its counterparts have in one bucket, in all blocks that share the bucket.
        Without a backward this parameter alone, since blocks that have run have freed theirs."""
        share = self._share_of(ref.node)
        return self._part_bytes(ref, wanted, itemsize, share if self._memory.train else min(1.0, share))

    def _share_of(self, parameter: fx.Node) -> float:
        """As `_share`, of a parameter: one that several regions read has no counterparts in other blocks."""
        share = self._share[self.home(parameter)]
        return min(1.0, share) if self.shared(parameter) else share

    def one_of_bucket(self, ref: TensorRef, wanted: Layout, itemsize: int) -> int:
        """As `bucket_bytes`, but of one block alone."""
        return self._part_bytes(ref, wanted, itemsize, min(1.0, self._share[self.home(ref.node)]))

    def _part_bytes(self, ref: TensorRef, wanted: Layout, itemsize: int, share: float) -> int:
        tensor = tensor_of(ref)
        local = self._memory.local_bytes(ref, wanted) // tensor.dtype.itemsize
        return math.ceil(min(local * max(1.0, share), tensor.numel() * share)) * itemsize


def _whole_bytes(parameter: fx.Node) -> int:
    return tensor_of(TensorRef(parameter, 0)).nbytes
