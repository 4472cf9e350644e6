"""Which parameters and gradients are in flight in the backward of a region, phase by phase.

`cost.memory.moments` and the solver's rows are both made of these terms, with the bytes of
`cost.memory.transfer_bytes`. Which buckets are gathered ahead is decided as in `cost.buckets.ahead`, with the sizes
that buckets have if nothing is sharded.

Where blocks share a bucket and one of them is recomputed, its parameters are a bucket of their own, which is reduced
after its backward alone; that of the other blocks is reduced once the blocks after it have run backward. So what these
leave behind is also there while the block before runs backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from autopar.cost.buckets.ahead import due_ahead
from autopar.cost.buckets.grouping import Grouping


class Phase(Enum):
    """The phases of a region's backward: until it reaches an op that reads a gathered parameter; at that op, when the
    bucket lands; since then; and when all gradients are there, activations are gone, and the bucket is reduced."""

    BEFORE = "before"
    LANDING = "landing"
    SINCE = "since"
    REDUCING = "reducing"


GATHER_FIELDS = "gathered", "arriving", "landing", "begun"
"""Fields of `TransferBytes` that concern parameters which a region's ops keep for backward; the other fields concern
those whose gradients are reduced after the region's backward."""

Terms = tuple[tuple[str, int], ...]  # fields of `TransferBytes`, each with the region of whose parameters it counts


class Gather(NamedTuple):
    """A region's bucket, in the form that `cost.buckets.ahead` takes."""

    region: int
    gathers: int
    read_bytes: int


def backward_transfers(grouping: Grouping, region: int, divided: str | None = None) -> dict[Phase, Terms]:
    """What is there in each phase of a region's backward, if all parameters that can move do.

    `divided`: the field of `TransferBytes` that counts for the next region besides, if recompute divides the bucket of
    both. LANDING is left out if as large a bucket arrives next, since then SINCE is no less; SINCE is left out if no op
    reads a gathered parameter.
    """
    after = grouping.after(region)
    goes_on = (("others", region),) if grouping.goes_on(region) else ()
    left = (("left_behind", after),) if after is not None else ()
    if goes_on and divided is not None:
        left = (*left, (divided, region + 1))
    while after is not None and not grouping.readers.any(after):
        after = grouping.after(after)
    called, alike = _ahead(grouping, after, read=True) if after is not None else ((), False)
    if not grouping.readers.any(region):
        return {
            Phase.BEFORE: (*goes_on, *left, *called),
            Phase.REDUCING: (*goes_on, ("reduction", region), *called),
        }
    arriving, alike = _ahead(grouping, region, read=True)
    since = (*goes_on, *left, ("gathered", region), *arriving)
    phases = {
        Phase.BEFORE: since if grouping.goes_on(region) else (*left, *called),
        Phase.SINCE: since,
        Phase.REDUCING: (*goes_on, ("reduction", region), *arriving),
    }
    if not grouping.goes_on(region) and not alike:
        early, _ = _ahead(grouping, region, read=False)
        phases[Phase.LANDING] = (*left, ("landing", region), *early)
    return phases


def terms_beside_copies(terms: Terms) -> Iterator[tuple[str, int, int | None]]:
    """The terms of a phase, each with the region whose parameters are there meanwhile, or None: parameters that another
    region shares with that one, as blocks called repeatedly do, are read from the copy that is there and do not arrive
    again (`autopar.runtime.communication.gathers`)."""
    there = next((region for field, region in terms if field in ("gathered", "landing")), None)
    for field, region in terms:
        yield field, region, there if field in GATHER_FIELDS and region != there else None


def begun_ahead(
    grouping: Grouping, region: int, further: Callable[[int], int | None], *, read: bool
) -> tuple[list[int], list[int]]:
    """The regions whose gathers have begun by the time a region is read (`read`) or before that: those whose bucket is
    arriving as a whole, and the next one, of which some collectives may have begun. `further`: the region that is read
    after one."""
    here, queue = Gather(region, 1, grouping.read_bytes(region)), list[Gather]()
    next_region = further(region)
    while next_region is not None and len(queue) < _FAR:
        if grouping.readers.any(next_region):
            queue.append(Gather(next_region, 1, grouping.read_bytes(next_region)))
        next_region = further(next_region)
    arriving = [gather.region for gather, _ in due_ahead(here, queue, 1, read=read)]
    return arriving, [gather.region for gather in queue if gather.region not in arriving][:1]


def _ahead(grouping: Grouping, region: int, *, read: bool) -> tuple[Terms, bool]:
    """What has begun of the buckets that backward reads after a region's, and whether one of those that arrive is of as
    many equal blocks as the region's."""
    arriving, begun = begun_ahead(grouping, region, grouping.before, read=read)
    alike = any(grouping.is_alike(other, region) for other in arriving)
    return (*(("arriving", other) for other in arriving), *(("begun", other) for other in begun)), alike


_FAR = 8  # how many buckets ahead are considered; those that can have begun are among the next three or four
