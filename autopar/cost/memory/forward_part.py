"""The forward of a training step, where it may hold the peak: where it gathers what backward does not gather again.

Backward has in its turn of a region all that forward had there, and gradients besides: what the regions before keep and
this one does as far as an op, the parameters that its ops read, those that arrive meanwhile. So forward's moments say
nothing more, but for a frozen parameter that some op reads and does not keep: those of an embedding, of layers before
the first one that is trained, of a head before which nothing is. No gradient of it comes, and backward does not gather
it. (A trained one that is not kept has a gradient as large.) Where such a one is read, arrives, or stays for an op to
come, the moments of forward count too.

And where small blocks share a bucket that is kept, and whose gradients move nowhere (parameters are stored sharded, and
every rank computes the whole): all of it lands in forward, twice as large for a moment, while of its gradients the rank
keeps its parts as they come. So the landing of a bucket of several blocks counts, which recomputed ones do not share.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.forward_way import forward_way
from autopar.cost.traffic import in_segment


class ForwardPart(NamedTuple):
    """`memory` and `grouping`: of the same graph as a pass without backward reads parameters; `regions`: of which the
    moments of forward count; `landings`: others, where that of a bucket of several blocks lands."""

    memory: StepMemory
    grouping: Grouping
    regions: frozenset[int]
    landings: frozenset[int]


def forward_part(memory: StepMemory, grouping: Grouping) -> ForwardPart | None:
    """Of a training step whose forward may hold the peak; None for all others. `grouping`: of the step."""
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
    some = frozenset(i for i in range(forward.regions) if i in staying or _mentions(forward, i, fetching))
    return ForwardPart(alone, forward, some, frozenset(shared - some))


def _not_keeping(memory: StepMemory, node: fx.Node) -> list[fx.Node]:
    """The ops that read a frozen parameter and do not keep it for backward."""
    if not memory.is_frozen(node):
        return []
    readers = [user for user in node.users if in_segment(user)]
    return [one for one in readers if node not in {memory.inputs[one][j].node for j in memory.saved(one)[0]}]


def _mentions(grouping: Grouping, region: int, some: set[int]) -> bool:
    """Whether anything of some regions is on its way in a region."""
    return any(one in some for terms in forward_way(grouping, region).values() for _, one in terms)
