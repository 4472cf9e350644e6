"""Which parameters and gradients are on their way in the backward of a region, phase by phase.

Where blocks share a bucket, a recomputed one's parameters are a bucket by themselves, which is reduced behind it alone;
and behind the blocks after it, those of the others. So what one of these leaves behind is there too, in the turn of the
block before it.

What `cost.memory.moments` counts and the solver's rows are both made of this, with the bytes of `cost.memory.moving`.
What is read ahead goes by `cost.buckets.ahead`, with the sizes that buckets have where nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import NamedTuple

from autopar.cost.buckets.ahead import due_ahead
from autopar.cost.buckets.grouping import Grouping


class Phase(Enum):
    """Of a region's backward: until it comes to an op that reads a gathered parameter; at that op, when its bucket
    lands; since; and when all of its gradients are there and its activations gone, and its bucket is handed in."""

    BEFORE = "before"
    LANDING = "landing"
    SINCE = "since"
    REDUCING = "reducing"


READ = "gathered", "arriving", "landing", "begun"
"""Fields of `Moving` that parameters which a region's ops keep have; the others are of those reduced behind it."""

Terms = tuple[tuple[str, int], ...]  # a field of `Moving`, and the region whose parameters have it


class Gather(NamedTuple):
    """A region's bucket, as `cost.buckets.ahead` asks for it."""

    region: int
    gathers: int
    read_bytes: int


def on_the_way(grouping: Grouping, region: int, divided: str | None = None) -> dict[Phase, Terms]:
    """What is there in each phase of a region's backward, if all that can move does.

    `divided`: the field of `Moving` that the next region has more, where recompute divides the bucket of both there.
    Without LANDING where what lands is as large as what arrives behind it, which is the more; and without SINCE where
    no op reads a gathered parameter.
    """
    after = grouping.after(region)
    goes_on = (("others", region),) if grouping.goes_on(region) else ()
    left = (("left_behind", after),) if after is not None else ()
    if goes_on and divided is not None:
        left = (*left, (divided, region + 1))
    while after is not None and not grouping.reads(after):
        after = grouping.after(after)
    called, alike = _ahead(grouping, after, read=True) if after is not None else ((), False)
    if not grouping.reads(region):
        return {
            Phase.BEFORE: (*goes_on, *left, *called),
            Phase.REDUCING: (*goes_on, ("reduction", region), *called),
        }
    arriving, alike = _ahead(grouping, region, read=True)
    since = (*goes_on, *left, ("gathered", region), *arriving)
    found = {
        Phase.BEFORE: since if grouping.goes_on(region) else (*left, *called),
        Phase.SINCE: since,
        Phase.REDUCING: (*goes_on, ("reduction", region), *arriving),
    }
    if not grouping.goes_on(region) and not alike:
        early, _ = _ahead(grouping, region, read=False)
        found[Phase.LANDING] = (*left, ("landing", region), *early)
    return found


def beside(terms: Terms) -> Iterator[tuple[str, int, int | None]]:
    """Terms of a phase, each with the region whose parameters are there meanwhile: what another shares with it, as
    blocks that are called again and again do, it reads from there (`autopar.runtime.communication.gathers`)."""
    there = next((region for kind, region in terms if kind in ("gathered", "landing")), None)
    for kind, region in terms:
        yield kind, region, there if kind in READ and region != there else None


def begun_ahead(
    grouping: Grouping, region: int, further: Callable[[int], int | None], *, read: bool
) -> tuple[list[int], list[int]]:
    """The regions whose gathers have begun, once a region is `read` or until then: what arrives whole, and the one of
    which a part may have. `further`: the region behind one, in the order in which they are read."""
    here, behind = Gather(region, 1, grouping.read_bytes(region)), list[Gather]()
    one = further(region)
    while one is not None and len(behind) < _FAR:
        if grouping.reads(one):
            behind.append(Gather(one, 1, grouping.read_bytes(one)))
        one = further(one)
    arriving = [one.region for one, _ in due_ahead(here, behind, 1, read=read)]
    return arriving, [one.region for one in behind if one.region not in arriving][:1]


def _ahead(grouping: Grouping, region: int, *, read: bool) -> tuple[Terms, bool]:
    """What has begun of buckets before a region's, as backward reads them; and whether one that arrives is of as many
    of the same blocks."""
    arriving, begun = begun_ahead(grouping, region, grouping.before, read=read)
    alike = any(grouping.is_alike(one, region) for one in arriving)
    return (*(("arriving", one) for one in arriving), *(("begun", one) for one in begun)), alike


_FAR = 8  # buckets that are looked at; those that count are among the next three or four
