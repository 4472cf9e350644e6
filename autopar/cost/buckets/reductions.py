"""Which earlier reductions backward waits for when a bucket begins its own: shared by the runtime and the simulator.

A bucket's gradients pass through one or several collectives, one after another. The input of the first is as large as
the gradients, so when the next bucket is due, this collective is waited for and its input freed. So is a collective
that another one follows, since that can only begin then. The last of several has a smaller input (a reduce-scatter over
eight ranks leaves an eighth), so it gets more time: until the inputs of all such last collectives together hold more
than half of what the due bucket hands in. It does not get a fixed number of turns, because the parameters of a block
are often in several buckets that are due in quick succession, which would leave it hardly any time. For the same reason
a small bucket does not wait for a large one: attention's gradients come soon after those of experts, and the next
experts' late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

SMALL = 2
"""A bucket does not wait for one in flight that has at least this many times its bytes, since there is little compute
between the two. Even with the small bucket's gradients and input buffer, and smaller buckets after it, no more memory
is held than when the large one was due."""
HELD = 2
"""All last collectives of several together may hold the due bucket's bytes divided by this."""


class Reduction(Protocol):
    """A bucket in flight: the bytes of its gradients, those of the running collective's input, and how many of its
    collectives have begun."""

    @property
    def handed_bytes(self) -> int: ...
    @property
    def under_way_bytes(self) -> int: ...
    @property
    def launched(self) -> int: ...
    @property
    def goes_on(self) -> bool:
        """Whether another collective follows the running one."""

    @property
    def holds_more(self) -> bool:
        """Whether another one follows, or the running one holds more memory than its result."""


Flight = TypeVar("Flight", bound=Reduction)


def due(flights: Sequence[Flight], handed_bytes: int) -> Iterator[Flight]:
    """The buckets in `flights`, oldest first, that a bucket of `handed_bytes` waits for before it begins.

    A lazy iterator: the caller waits for the running collective of each one, and begins the one that follows, before it
    asks for the next.
    """
    beside = [flight for flight in flights if flight.holds_more and flight.handed_bytes < SMALL * handed_bytes]
    last = [flight for flight in beside if flight.launched > 1 and not flight.goes_on]
    for flight in beside:
        if flight.launched == 1 or flight.goes_on:
            yield flight
    held_bytes = sum(flight.under_way_bytes for flight in beside if flight.holds_more)
    for flight in last:
        if held_bytes <= handed_bytes // HELD:
            return
        held_bytes -= flight.under_way_bytes
        yield flight
