"""Buckets: which parameters' collectives run as one, and what part of a bucket each parameter accounts for.

A bucket lies within one region of the graph (a repeated block, or what lies between), or, where blocks are smaller than
`LEAST_PART` of a bucket and not recomputed, within several neighbouring blocks of a repeat, whichever constraints tell
these apart; so it does where its members are tiny and not gathered (`cost.buckets.tiny`). Its members are
converted by collectives of the same kinds over the same axes in the same dtypes, in the order in which the graph first
uses them. What exceeds `StepMemory.bucket_bytes`, or the region's largest parameter where that is larger (as far as
`most_bucket_bytes`), is cut into buckets of about that size: a collective hides behind the ops that read the bucket
before it, and a large bucket behind a small one's would not.

The latency of a bucket is priced by its members, so that a price belongs to one parameter and one pair of layouts: of
the parameters that are read in one region alone, each pays its part of the elements of all that could share its bucket,
or its bytes over those of a bucket where that is more, and one whole at most. Where all of them move alike, the parts
add up to about the buckets that run; where they move in several ways, what is missing is added
(`cost.buckets.latency`). Where small blocks are recomputed, some latency is not counted.
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
    """A parameter as some ops want it, outside segments (-1) or in one, first of all by the node `first`.

    `kept`: how many uses outside segments keep it for backward; `saved`: how many do, wherever; `replayed`: whether a
    replay reads it; `enters`: whether a gradient comes back.
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
    """Conversions that are one bucket; `again`: those whose gathered copies backward needs."""

    members: list[Conversion] = field(default_factory=list)

    @property
    def again(self) -> list[Conversion]:
        return [one for one in self.members if one.kept and one.regather]

    def planned(self) -> Bucket:
        names = tuple(str(one.ref.node.target) for one in self.members)
        return Bucket(names, tuple(one.wanted for one in self.members), self.members[0].segment)


def group(
    conversions: Sequence[Conversion], grouping: Grouping, memory: StepMemory, dtypes: Mapping[fx.Node, torch.dtype]
) -> list[Grouped]:
    """The buckets of `conversions`, which come in the order of their first uses; `dtypes`: of the gradients' sums."""
    moving = [one for one in conversions if one.forward or one.backward]
    keys = [_key(one, grouping, memory, dtypes) for one in moving]
    again = {key for key, one in zip(keys, moving, strict=True) if one.kept and one.regather}
    alike: dict[tuple[object, ...], list[Conversion]] = {}
    for key, one in zip(keys, moving, strict=True):  # what nobody keeps goes with what is gathered again
        together = key in again and (one.regather or not one.kept)
        alike.setdefault((*key, together), []).append(one)
    found: list[Grouped] = []
    for members in joined(alike, memory):
        sizes = [memory.local_bytes(one.ref, one.wanted) for one in members]
        most, full = max(grouping.bucket_of(one.ref.node)[1] for one in members), 0
        found.append(Grouped())
        for one, size in zip(members, sizes, strict=True):  # no bucket has more than `most`, or one member has
            if full and full + size > most:
                found.append(Grouped())
                full = 0
            found[-1].members.append(one)
            full += size
    return found


def _key(
    one: Conversion, grouping: Grouping, memory: StepMemory, dtypes: Mapping[fx.Node, torch.dtype]
) -> tuple[object, ...]:
    """Equal for what can move together."""
    ways = tuple(tuple((move.kind, move.axis) for move in moves) for moves in (one.forward, one.backward))
    tensor = tensor_of(one.ref)
    kinds = tensor.dtype, memory.stored_dtype(one.ref.node), dtypes[one.ref.node], tensor.requires_grad
    return (grouping.group(one.first, one.segment), one.segment, ways, one.enters, *kinds)
