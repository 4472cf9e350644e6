"""Which parameters are in flight in the regions of a forward: the counterpart of `cost.memory.backward_transfers`.

A copy of a parameter arrives with its bucket, when the first op of the bucket's regions reads a parameter that moves,
and is freed after its last reader; meanwhile the next bucket arrives. `cost.memory.forward_moments` and the solver's
`forward_rows` are both made of these terms.
"""

from __future__ import annotations

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.backward_transfers import Phase, Terms, begun_ahead


def forward_transfers(grouping: Grouping, region: int) -> dict[Phase, Terms]:
    """What is there in each phase of a region (BEFORE its bucket is read, at its LANDING, and SINCE), if all that can
    move does. Copies that ops of this or other regions still read count elsewhere.

    If a region's parameters fill several buckets, one lands at a time, and what of it no op is reading is there too;
    that is nothing if the bucket is a single parameter.
    """
    group = grouping.together(region)
    if not any(grouping.readers.any(other) for other in group):
        return {Phase.BEFORE: _called(grouping, group.start)}
    begins, cut = region == group.start, grouping.is_cut(region)
    rest = (("gathered", region),) if grouping.readers.several(region) else ()
    further = rest if cut else tuple(("gathered", other) for other in group if other > region)
    since = (*further, *_ahead(grouping, group.start, read=True))
    phases = {Phase.SINCE: since, Phase.BEFORE: _called(grouping, group.start) if begins else since}
    if begins:
        landing = tuple(("landing", other) for other in group)
        phases[Phase.LANDING] = (*landing, *_ahead(grouping, group.start, read=False))
    return phases


def _called(grouping: Grouping, region: int) -> Terms:
    """What the buckets before a region's have begun to gather ahead."""
    before = grouping.before(region)
    while before is not None and not grouping.readers.any(before):
        before = grouping.before(before)
    return _ahead(grouping, grouping.together(before).start, read=True) if before is not None else ()


def _ahead(grouping: Grouping, region: int, *, read: bool) -> Terms:
    """What has begun of the buckets after a region's by the time it is read (`read`), or before that."""
    arriving, begun = begun_ahead(grouping, region, grouping.after, read=read)
    by_field = [("arriving", arriving), ("begun", begun)]
    return tuple((field, other) for field, firsts in by_field for first in firsts for other in grouping.together(first))
