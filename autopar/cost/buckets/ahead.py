"""Which gathers begin ahead of use: shared by the runtime and the simulator.

A bucket's collective must begin so early that there is enough compute to hide it, but no earlier, since what arrives
takes memory. The compute between two buckets is about proportional to the parameters that are read there, so it is
measured in their bytes. Let b be the bytes of a bucket (as gathered), and d those of the buckets that are still to be
read before it. Its last collective begins when d < b / 2. If it has several collectives, as over two axes, the one
before the last begins when d < 2 b, and so on. So with equal buckets, the next bucket is being gathered, and of the one
after it all but the last collective. A small bucket in between, such as that of a block's norms, does not change this;
it counts as being as large as the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

# How far ahead a collective begins, in parts of its bucket's bytes: the last one, and more for each one before it. The
# results of earlier collectives take less memory.
_LAST, _EARLIER = 0.5, 1.5
# How many buckets are considered, for each collective of the bucket that has most: many small buckets do not give the
# time that a large one needs. Buckets that are small (below) do not count.
_REACH = 2
_SMALL = 8  # a bucket is small if the largest so far has at least so many times its bytes


class Gather(Protocol):
    """A bucket that is gathered: its number of collectives, and its bytes as gathered."""

    @property
    def gathers(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...


Some = TypeVar("Some", bound=Gather)


def due_ahead(here: Some, behind: Iterable[Some], longest: int, *, read: bool) -> Iterator[tuple[Some, int]]:
    """Buckets whose gathers are due, each with how many of its collectives should have begun by now.

    `here`: the current bucket; `behind`: those after it, in the order of their use. `longest`: the most collectives
    that any bucket has; `read`: whether `here` has arrived already.
    """
    last = largest = here.read_bytes
    before, seen = 0 if read else last, 0
    for one in behind:
        largest = max(largest, one.read_bytes)
        seen += _SMALL * one.read_bytes > largest
        if seen > _REACH * longest:
            return
        size = max(1, last, one.read_bytes)
        later = max(0, 1 + math.floor((before / size - _LAST) / _EARLIER))  # how many of its collectives can wait
        if later < one.gathers:
            yield one, one.gathers - later
        last = one.read_bytes
        before += last
