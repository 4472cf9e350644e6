"""Which reductions backward waits for when the gradients of a bucket are there: the runtime and the simulator ask here.

A bucket's gradients go through one collective or several, one after another. What the first was handed is as large as
the gradients, so it is waited for, and what it was handed freed, at the next bucket's turn; and so is one that others
follow, since they begin then. The last of several was handed but a part (a reduce-scatter over eight ranks leaves an
eighth), so it has longer: until all of those together hold more than half of what the bucket at its turn hands in. The
parameters of a block often are in several buckets, that come in quick succession: with a fixed number of turns the last
collective of one would have no more time than there is between two of them. For the same reason a small bucket does not
wait for a large one: attention's gradients come soon behind those of experts, and the next experts' late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

SMALL = 2
"""A bucket of so many times fewer bytes than one under way does not wait for it, as there is little compute between
the two. With what the small one takes (its gradients, and the buffer that is handed in), and smaller ones behind it,
no more is held than at the turn of the large one."""
HELD = 2
"""The last of several collectives may hold, all together, a bucket's bytes by this."""


class Reduction(Protocol):
    """A bucket on its way: bytes of its gradients, what the collective under way was handed, how many have begun."""

    @property
    def handed_bytes(self) -> int: ...
    @property
    def under_way_bytes(self) -> int: ...
    @property
    def launched(self) -> int: ...
    @property
    def goes_on(self) -> bool:
        """Whether another collective follows the one under way."""

    @property
    def holds_more(self) -> bool:
        """Whether one follows, or the one under way keeps more memory than its result."""


Some = TypeVar("Some", bound=Reduction)


def due(flights: Sequence[Some], handed_bytes: int) -> Iterator[Some]:
    """Those of `flights`, oldest first, that a bucket of so many bytes waits for before it begins.

    The caller lands each, and begins what follows, before it asks for the next one.
    """
    beside = [one for one in flights if one.holds_more and one.handed_bytes < SMALL * handed_bytes]
    last = [one for one in beside if one.launched > 1 and not one.goes_on]
    for one in beside:
        if one.launched == 1 or one.goes_on:
            yield one
    held = sum(one.under_way_bytes for one in beside if one.holds_more)
    for one in last:
        if held <= handed_bytes // HELD:
            return
        held -= one.under_way_bytes
        yield one
