"""The regions of a training step whose forward may hold the peak: those that gather what backward does not.

In general, the backward of a region has all that its forward had, and gradients besides: what the regions before keep
and this one keeps up to an op, the parameters that the op reads, and those that arrive meanwhile. There are two
exceptions.

A frozen parameter that an op reads but does not keep for backward: that of an embedding, of layers before the first
trained one, or of a head before which nothing is trained. It has no gradient, and backward does not gather it. (A
trained parameter that is not kept has a gradient of the same size.) Where such a parameter is read, arrives, or stays
for a later op, the moments of forward count too.

A bucket that several small blocks share, that is kept, and whose gradients move nowhere (parameters are stored sharded,
and every rank computes the whole gradient): all of it lands in forward, where it is there twice for a moment, while a
rank keeps only its part of each gradient. So the landing of a bucket of several blocks counts; blocks recomputed as a
whole do not share one.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.forward_transfers import forward_transfers
from autopar.cost.traffic import in_segment


class ForwardPart(NamedTuple):
    """`memory`, `grouping`: those of a pass without backward over the same graph; `regions`: whose forward counts at
    all points; `landings`: further regions, where only the landing of a bucket of several blocks counts."""

    memory: StepMemory
    grouping: Grouping
    regions: frozenset[int]
    landings: frozenset[int]


def forward_part(memory: StepMemory, grouping: Grouping) -> ForwardPart | None:
    """The part of a training step's forward that may hold the peak; None if there is none. `grouping`: the step's."""
    read = {node: readers for node in memory.graph.nodes if (readers := _not_keeping(memory, node))}
    shared = {i for i in range(grouping.regions) if grouping.begins(i) and grouping.goes_on(i)}
    if not read and not shared:
        return None
    alone = memory.without_backward
    forward = alone.grouping(grouping.repeats)
    fetching, staying = set[int](), set[int]()
    for node in read:
        regions = [forward.region(user) for user in node.users if in_segment(user)]
        fetching.update(regions)
        staying.update(range(min(regions), max(regions) + 1))
    counting = frozenset(i for i in range(forward.regions) if i in staying or _has_in_flight(forward, i, fetching))
    return ForwardPart(alone, forward, counting, frozenset(shared - counting))


def _not_keeping(memory: StepMemory, node: fx.Node) -> list[fx.Node]:
    """The ops that read a frozen parameter and do not keep it for backward."""
    if not memory.is_frozen(node):
        return []
    readers = [user for user in node.users if in_segment(user)]
    return [user for user in readers if node not in {memory.inputs[user][j].node for j in memory.saved(user)[0]}]


def _has_in_flight(grouping: Grouping, region: int, fetching: set[int]) -> bool:
    """Whether parameters of any of the regions `fetching` are in flight in a region."""
    return any(other in fetching for terms in forward_transfers(grouping, region).values() for _, other in terms)
