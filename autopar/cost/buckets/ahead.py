"""Which gathers begin ahead of use: the runtime and the simulator ask here.

A collective of a bucket has to begin so early that there is compute to hide it, and no earlier, since what arrives
takes memory. The compute between two buckets goes by the parameters that are read there, so it is told in their bytes.
The last collective of a bucket of b bytes (as they are read) begins where those read from the next bucket on, but
before it, are less than b / 2; the one before the last, if there are several one after another, as over two axes,
where they are less than 2 b, and so on. So of equal buckets the next one is on its way, and of the one behind it all
but the last collective; a small bucket in between, as of a block's norms, changes nothing. It is itself taken for as
large as the one before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

_LAST, _EARLIER = 0.5, 1.5  # of a bucket's bytes; the results of earlier collectives take less memory
_REACH = 2  # buckets by collectives that are looked at: many smaller ones do not add up to the time of a large one.
# Those that are small beside the largest so far do not count there.
_SMALL = 8  # times fewer bytes than the largest


class Gather(Protocol):
    """A bucket that is gathered: how many collectives that takes, and its bytes as they are read."""

    @property
    def gathers(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...


Some = TypeVar("Some", bound=Gather)


def due_ahead(here: Some, behind: Iterable[Some], longest: int, *, read: bool) -> Iterator[tuple[Some, int]]:
    """Of the buckets `behind` one, in the order of their use, how many collectives of each are to have begun by now.

    `longest`: the most collectives that any takes; `read`: whether the one before them, `here`, is there already.
    """
    last = largest = here.read_bytes
    before, seen = 0 if read else last, 0
    for one in behind:
        largest = max(largest, one.read_bytes)
        seen += _SMALL * one.read_bytes > largest
        if seen > _REACH * longest:
            return
        size = max(1, last, one.read_bytes)
        later = max(0, 1 + math.floor((before / size - _LAST) / _EARLIER))  # of its collectives, that can wait
        if later < one.gathers:
            yield one, one.gathers - later
        last = one.read_bytes
        before += last
