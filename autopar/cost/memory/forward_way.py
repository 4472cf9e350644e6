"""Which parameters are on their way in a pass without backward, region by region: `cost.memory.on_the_way` forwards.

Each copy of a parameter comes with its bucket, where the first op of the bucket's regions reads one that moves, and is
freed behind its last reader. The bucket behind arrives meanwhile. What `cost.memory.forward_moments` counts and the
solver's `forward_rows` are both made of this.
"""

from __future__ import annotations

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.memory.on_the_way import Phase, Terms, begun_ahead


def forward_way(grouping: Grouping, region: int) -> dict[Phase, Terms]:
    """What is there in each phase of a region beside copies that its own ops or those of others still read, if all
    that can move does: BEFORE its bucket is read, at its LANDING, and SINCE.

    Of parameters that fill several buckets one lands at a time, and the rest of it is there beside what ops read: none
    of a bucket that is one parameter.
    """
    group = grouping.together(region)
    if not any(grouping.reads(one) for one in group):
        return {Phase.BEFORE: _called(grouping, group.start)}
    begins, cut = region == group.start, grouping.is_cut(region)
    rest = (("gathered", region),) if grouping.reads_several(region) else ()
    further = rest if cut else tuple(("gathered", one) for one in group if one > region)
    since = (*further, *_ahead(grouping, group.start, read=True))
    found = {Phase.SINCE: since, Phase.BEFORE: _called(grouping, group.start) if begins else since}
    if begins:
        landing = tuple(("landing", one) for one in group)
        found[Phase.LANDING] = (*landing, *_ahead(grouping, group.start, read=False))
    return found


def _called(grouping: Grouping, region: int) -> Terms:
    """What the buckets before a region's have called for."""
    before = grouping.before(region)
    while before is not None and not grouping.reads(before):
        before = grouping.before(before)
    return _ahead(grouping, grouping.together(before).start, read=True) if before is not None else ()


def _ahead(grouping: Grouping, region: int, *, read: bool) -> Terms:
    """What has begun of buckets behind a region's, once it is `read` or until then."""
    arriving, begun = begun_ahead(grouping, region, grouping.after, read=read)
    terms = [("arriving", arriving), ("begun", begun)]
    return tuple((kind, one) for kind, some in terms for first in some for one in grouping.together(first))
