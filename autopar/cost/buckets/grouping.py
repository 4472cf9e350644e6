"""Which parameters may share buckets, by the graph alone, and what part of a bucket each accounts for.

`cost.buckets.buckets` says what a bucket is.
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

from autopar.cost.buckets.size import LEAST_PART, TINY_PART
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.structure.blocks import Repeat, regions
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout

if TYPE_CHECKING:
    from autopar.cost.memory.forward_part import ForwardPart
    from autopar.cost.memory.moving import Moving


@dataclass(frozen=True)
class Stretch:
    """The blocks of one repeat, or the nodes between two: `count` groups whose parameters fill `buckets` each."""

    first: int
    count: int
    buckets: int


class Grouping:
    """What the graph alone says about buckets, whatever is chosen."""

    def __init__(self, memory: StepMemory, repeats: Sequence[Repeat]) -> None:
        nodes = list(memory.graph.nodes)
        self._position = {node: i for i, node in enumerate(nodes)}
        rows = regions(len(nodes), repeats)
        self._first = [row.first for row in rows]
        self._parts: dict[fx.Node, float] = {}
        self._home: dict[fx.Node, int] = {}  # region in which a parameter is read first
        self._memory, self.repeats = memory, tuple(repeats)
        self.full_bytes = memory.bucket_bytes
        self._forms: dict[TensorRef, tuple[object, ...]] = {}
        self.moved: dict[tuple[object, ...], Moving] = {}  # what `cost.memory.moving` has told already
        self._divided: dict[frozenset[int], Grouping] = {}
        filled: dict[int, list[fx.Node]] = {}
        for node in nodes:
            if memory.is_parameter(node):
                read = sorted({self.region(user) for user in node.users}) or [self.region(node)]
                self._home[node] = read[0]
                if len(read) == 1:
                    filled.setdefault(read[0], []).append(node)
        self._last_reader = [-1] * len(rows)
        self._first_reader: dict[int, tuple[bool, int]] = {}
        self._sharing: dict[int, set[fx.Node]] = {}  # parameters that a region keeps, and others read
        kept: list[set[fx.Node]] = [set() for _ in rows]
        for reader in {user for node in self._home for user in node.users if user.op != "output"}:
            refs, region = memory.inputs[reader], self.region(reader)
            at = self._position[reader]
            vectors = all(tensor_of(ref).dim() < 2 for ref in refs if memory.is_trainable(ref.node))
            self._first_reader[region] = min((vectors, at), self._first_reader.get(region, (vectors, at)))
            again = memory.saved(reader)[0] if memory.train else range(len(refs))
            saved = {refs[j].node for j in again if memory.is_parameter(refs[j].node)}
            self._sharing.setdefault(region, set()).update(filter(self.shared, saved))
            if saved:
                self._last_reader[region] = max(self._last_reader[region], self._position[reader])
                kept[region] |= saved
        bytes_of = [[tensor_of(TensorRef(node, 0)).nbytes for node in filled.get(i, ())] for i in range(len(rows))]
        total = [sum(some) or 1 for some in bytes_of]
        full = [max(self.full_bytes, min(memory.most_bucket_bytes, max(some, default=0))) for some in bytes_of]
        self.stretches: list[Stretch] = []
        self._stretch: list[int] = []  # of each region
        self._group: list[tuple[int, int]] = []
        self._share: list[float] = []  # of a bucket's bytes, what one region's parameters have
        self._buckets: list[float] = []  # how many buckets of each kind a region has, mostly a part of one
        self._sizes: list[float] = []  # bytes that one of these has at most, but for a larger parameter
        for i, row in enumerate(rows):
            blocks = repeats[row.repeat].count if row.repeat is not None else 1
            if row.repeat is None or row.instance == 0:
                together = min(blocks, max(1, int(LEAST_PART * self.full_bytes) // total[i]))
                buckets = max(1, total[i] // full[i])
                self.stretches.append(Stretch(row.first, -(-blocks // together), buckets))
            stretch = self.stretches[-1]
            self._stretch.append(len(self.stretches) - 1)
            self._group.append((len(self.stretches) - 1, row.instance // together))
            self._share.append(together / stretch.buckets)
            self._buckets.append(stretch.count / blocks)
            self._sizes.append(max(full[i], total[i] / stretch.buckets))
            for node in filled.get(i, ()):
                self._parts[node] = tensor_of(TensorRef(node, 0)).nbytes / total[i] * stretch.count / blocks
        self._several = [len(some) > 1 for some in kept]
        sizes = [sum(tensor_of(TensorRef(node, 0)).nbytes for node in some) for some in kept]
        self._read_bytes = [round(size * share) for size, share in zip(sizes, self._share, strict=True)]
        if not memory.train:  # in backward, gradients are beside what is a bucket by itself
            largest = [max((tensor_of(TensorRef(node, 0)).nbytes for node in some), default=0) for some in kept]
            self._read_bytes = [max(*pair) for pair in zip(self._read_bytes, largest, strict=True)]

    def shares(self, region: int) -> bool:
        """Whether a region's parameters are in one bucket with those of blocks like it, and none in several regions."""
        return self._share[region] > 1.0 and not self._sharing.get(region)

    def divided(self, apart: Set[int]) -> Grouping:
        """The same where regions are recomputed that share buckets otherwise, whole groups of them (`together`): each
        has its own."""
        apart = frozenset(filter(self.shares, apart))
        if not apart:
            return self
        if apart not in self._divided:
            found = self._divided[apart] = copy.copy(self)
            found._forms = {}
            found._group, found._share, found._read_bytes = list(self._group), list(self._share), list(self._read_bytes)
            for region in range(len(self._group)):
                stretch, together = self._stretch[region], self.together(region)
                rest = [region] if region in apart else [one for one in together if one not in apart]
                found._group[region] = stretch, rest[0]
                if region in apart or len(rest) < len(together):
                    found._share[region] = float(len(rest))
                    found._read_bytes[region] = round(self._read_bytes[region] / self._share[region] * len(rest))
        return self._divided[apart]

    @cached_property
    def forward(self) -> ForwardPart | None:
        """The forward of a training step, where it may hold the peak."""
        from autopar.cost.memory.forward_part import forward_part  # it asks this class in turn

        return forward_part(self._memory, self)

    @property
    def regions(self) -> int:
        """How many regions there are."""
        return len(self._first)

    def region(self, node: fx.Node) -> int:
        """The number of the region that a node lies in."""
        return bisect_right(self._first, self._position[node]) - 1

    def group(self, node: fx.Node, segment: int) -> tuple[int, int]:
        """Equal for nodes whose parameters may share buckets; in a segment (not -1): those of its block alone."""
        region = self.region(node)
        return (-1, region) if segment >= 0 else self._group[region]

    def shared(self, parameter: fx.Node) -> bool:
        """Whether several regions read a parameter."""
        return len({self.region(user) for user in parameter.users if user.op != "output"}) > 1

    def share(self, region: int, other: int) -> bool:
        """Whether two regions keep a parameter that both read."""
        return not self._sharing.get(region, set()).isdisjoint(self._sharing.get(other, ()))

    def home(self, parameter: fx.Node) -> int:
        """The region whose buckets a parameter is in: the first that reads it."""
        return self._home[parameter]

    def last_reader(self, region: int) -> int:
        """The position of a region's last op that keeps a parameter for backward (of a pass without backward: that
        reads one), -1 without one."""
        return self._last_reader[region]

    def first_reader(self, region: int) -> int:
        """The position of a region's first op that reads a weight, where a bucket's gradients are there; of vectors and
        what is not trained only where nothing else is read, as in many plans no gradients of these move. Of a region
        without a parameter, where it begins."""
        _, found = self._first_reader.get(region, (True, self._first[region]))
        return found

    def reads(self, region: int) -> bool:
        """Whether any of a region's ops keeps a parameter for backward; without backward: reads one."""
        return self._last_reader[region] >= 0

    def read_bytes(self, region: int) -> int:
        """What is kept of a bucket of a region's, where nothing is cut."""
        return self._read_bytes[region]

    def begins(self, region: int) -> bool:
        """Whether a region is the first of those whose parameters are in the same buckets: there they are reduced."""
        return region == 0 or self._group[region - 1] != self._group[region]

    def goes_on(self, region: int) -> bool:
        """Whether the next region's parameters are in the same buckets."""
        return region + 1 < len(self._group) and self._group[region + 1] == self._group[region]

    def together(self, region: int) -> range:
        """The regions whose parameters are in the same buckets as a region's."""
        mine = self._group[region]
        return range(bisect_left(self._group, mine), bisect_right(self._group, mine))

    def is_cut(self, region: int) -> bool:
        """Whether a region's parameters fill several buckets."""
        return self.stretches[self._stretch[region]].buckets > 1

    def alone(self, ref: TensorRef, wanted: Layout) -> float:
        """By how much a bucket is larger that a parameter fills by itself, as `wanted`, than what it is taken to have
        of one: more than 1 only where buckets are cut, and it is larger than its part of all of them."""
        taken = self.one_of_bucket(ref, wanted, 1)
        local = self._memory.local_bytes(ref, wanted) // tensor_of(ref).dtype.itemsize
        return local / taken if taken and self.is_cut(self._home[ref.node]) else 1.0

    def is_alike(self, region: int, other: int) -> bool:
        """Whether two regions' buckets are of equal blocks, and of as many."""
        return (self._stretch[region], self._share[region]) == (self._stretch[other], self._share[other])

    def reads_several(self, region: int) -> bool:
        """Whether a region's ops keep more than one parameter for backward; without backward: read more than one."""
        return self._several[region]

    def before(self, region: int) -> int | None:
        """The last region before one whose parameters are in other buckets."""
        return next((i for i in range(region - 1, -1, -1) if self._group[i] != self._group[region]), None)

    def after(self, region: int) -> int | None:
        """The first region after one whose parameters are in other buckets."""
        return next((i for i in range(region + 1, len(self._group)) if self._group[i] != self._group[region]), None)

    def stretch(self, node: fx.Node) -> int:
        """The number of the stretch that a node lies in; of a parameter: that reads it first."""
        return self._stretch[self._home[node] if node in self._home else self.region(node)]

    def stretch_of(self, region: int) -> int:
        """The number of the stretch that a region's ops lie in."""
        return self._stretch[region]

    def bucket_of(self, parameter: fx.Node) -> tuple[float, float]:
        """The part of a bucket's latency that a parameter pays at least, 1 where several regions read it; and how many
        bytes a bucket has at most, of those that its region's parameters are cut into, but for a parameter that is
        larger."""
        return self._parts.get(parameter, 1.0), self._sizes[self._home[parameter]]

    def buckets(self, region: int) -> float:
        """How many buckets the parameters of a region have that move alike, mostly one; a part of one where several
        blocks share theirs."""
        return self._buckets[region]

    def in_one_block(self, parameter: fx.Node) -> bool:
        """Whether the region that a parameter lies in is the only one that reads it."""
        return not self.shared(parameter) and self._home[parameter] == self.region(parameter)

    def is_tiny(self, ref: TensorRef, wanted: Layout) -> bool:
        """Whether a parameter that is not gathered, wanted so, may be reduced with the like of other blocks
        (`cost.buckets.tiny`)."""
        return self._memory.local_bytes(ref, wanted) <= TINY_PART * self.full_bytes

    def calls(self, ref: TensorRef, wanted: Layout) -> float:
        """How many collectives, mostly a part of one, the conversion of a parameter accounts for."""
        part, size = self.bucket_of(ref.node)
        return max(part, min(1.0, self._memory.local_bytes(ref, wanted) / size))

    def form(self, ref: TensorRef) -> tuple[object, ...]:
        """Equal for parameters of which equal layouts take equal bytes on their way."""
        found = self._forms.get(ref)
        if found is None:
            tensor, memory, node = tensor_of(ref), self._memory, ref.node
            kinds = tensor.dtype, memory.stored_dtype(node), memory.is_trainable(node), tensor.requires_grad
            found = self._forms[ref] = (tuple(tensor.shape), *kinds, self._share[self._home[node]])
        return found

    def bucket_bytes(self, ref: TensorRef, wanted: Layout, itemsize: int) -> int:
        """What parameters like this one have of the bytes of one bucket, in all blocks that share it; in a pass without
        backward this one alone, since blocks that are through have freed theirs."""
        share = self._share[self._home[ref.node]]
        return self._part_bytes(ref, wanted, itemsize, share if self._memory.train else min(1.0, share))

    def one_of_bucket(self, ref: TensorRef, wanted: Layout, itemsize: int) -> int:
        """The same of one block alone."""
        return self._part_bytes(ref, wanted, itemsize, min(1.0, self._share[self._home[ref.node]]))

    def _part_bytes(self, ref: TensorRef, wanted: Layout, itemsize: int, share: float) -> int:
        tensor = tensor_of(ref)
        local = self._memory.local_bytes(ref, wanted) // tensor.dtype.itemsize
        return math.ceil(min(local * max(1.0, share), tensor.numel() * share)) * itemsize
