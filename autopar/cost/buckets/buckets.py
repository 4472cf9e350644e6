"""Buckets: which parameters share collectives, and what part of a bucket each parameter is charged.

A bucket lies within one region of the graph (a repeated block, or the nodes between two repeats). It spans several
neighbouring blocks of a repeat, whatever constraints tell them apart, if the blocks are smaller than `LEAST_PART` of a
bucket and not recomputed, or if its members are tiny and not gathered (`cost.buckets.tiny`). The members of a bucket
are converted by the same kinds of collectives over the same axes in the same dtypes; they are in the order in which the
graph first uses them. A bucket has about `StepMemory.bucket_bytes` at most, or the bytes of the region's largest
parameter if that is larger (but not above `most_bucket_bytes`); what exceeds this is cut into several. The reason: a
collective hides behind the ops that read the bucket before it, and those of a small bucket do not hide a large one.

A bucket's latency is charged to its members, so that a price belongs to one parameter and one pair of layouts. A
parameter that only one region reads is charged its part of the elements of all parameters that could share its bucket,
or its bytes over those of a bucket if that is more, but at most one whole latency. If all of them move in the same way,
the parts add up to about the number of buckets; if they move in several ways, `cost.buckets.latency` adds what is
missing. If small blocks are recomputed, some latency is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.tiny import joined
from autopar.cost.memory.formulas import StepMemory
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.plans import Bucket
from autopar.resharding.reshard import Move


@dataclass
class Conversion:
    """The conversion of a parameter to the layout that some ops want, outside recomputed segments (`segment` -1) or in
    one. `first`: the first node that reads it.

    `kept`: the number of uses outside segments that save it for backward; `saved`: the number of all uses that do;
    `replayed`: whether a replay reads it; `enters`: whether backward computes a gradient of it.
    """

    ref: TensorRef
    wanted: Layout
    segment: int
    first: fx.Node
    forward: list[Move]
    backward: list[Move]
    regather: bool
    kept: int = 0
    saved: int = 0
    replayed: bool = False
    enters: bool = False


@dataclass
class Grouped:
    """The conversions of one bucket; `again`: those that backward gathers again."""

    members: list[Conversion] = field(default_factory=list)

    @property
    def again(self) -> list[Conversion]:
        return [member for member in self.members if member.kept and member.regather]

    def planned(self) -> Bucket:
        names = tuple(str(member.ref.node.target) for member in self.members)
        return Bucket(names, tuple(member.wanted for member in self.members), self.members[0].segment)


def group(
    conversions: Sequence[Conversion], grouping: Grouping, memory: StepMemory, dtypes: Mapping[fx.Node, torch.dtype]
) -> list[Grouped]:
    """The buckets of `conversions`, which must be in the order of their first uses.

    `dtypes`: for each parameter the dtype in which its gradients are summed.
    """
    moving = [conversion for conversion in conversions if conversion.forward or conversion.backward]
    keys = [_key(conversion, grouping, memory, dtypes) for conversion in moving]
    again = {key for key, conversion in zip(keys, moving, strict=True) if conversion.kept and conversion.regather}
    alike: dict[tuple[object, ...], list[Conversion]] = {}
    for key, conversion in zip(keys, moving, strict=True):  # what no op saves joins the bucket that is gathered again
        together = key in again and (conversion.regather or not conversion.kept)
        alike.setdefault((*key, together), []).append(conversion)
    buckets: list[Grouped] = []
    for members in joined(alike, memory):
        most_bytes, filled = max(grouping.bucket_of(member.ref.node)[1] for member in members), 0
        buckets.append(Grouped())
        for member in members:
            size = memory.local_bytes(member.ref, member.wanted)
            if filled and filled + size > most_bytes:  # only a bucket of one large member exceeds it
                buckets.append(Grouped())
                filled = 0
            buckets[-1].members.append(member)
            filled += size
    return buckets


def _key(
    conversion: Conversion, grouping: Grouping, memory: StepMemory, dtypes: Mapping[fx.Node, torch.dtype]
) -> tuple[object, ...]:
    """A key that is equal for conversions that can share a bucket."""
    ways = tuple(tuple((move.kind, move.axis) for move in moves) for moves in (conversion.forward, conversion.backward))
    tensor = tensor_of(conversion.ref)
    kinds = tensor.dtype, memory.stored_dtype(conversion.ref.node), dtypes[conversion.ref.node], tensor.requires_grad
    return (grouping.group(conversion.first, conversion.segment), conversion.segment, ways, conversion.enters, *kinds)
