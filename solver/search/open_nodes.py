"""The nodes of branch and bound that are still open.

A node is an `Outcome` whose `counts` are its box: the relaxation of the box, or with the status "waiting" that of the
box from which it was cut, until its own is solved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappush

from autopar.solver.linear.outcome import Outcome


class OpenNodes:
    """Open nodes in order of their bounds; in a large program also the boxes that were `cut` by choices, which come
    last, each with its parts that are still open."""

    def __init__(self) -> None:
        self.cut: list[tuple[Outcome, list[Outcome]]] = []
        self._heap: list[tuple[float, int, Outcome]] = []
        self._order = itertools.count()  # of insertion: decides between equal bounds

    def __iter__(self) -> Iterator[Outcome]:
        """The nodes, but for the parts of cut boxes."""
        return (node for *_, node in self._heap)

    def push(self, node: Outcome) -> None:
        """Add a node, unless nothing is left of its box."""
        if node.status not in ("closed", "infeasible"):
            heappush(self._heap, (node.objective, next(self._order), node))

    def first(self) -> Outcome | None:
        """The node of least bound, but for the parts of cut boxes."""
        return self._heap[0][2] if self._heap else None

    def take(self, suits: Callable[[Outcome], bool]) -> Outcome:
        """Remove and return a node that suits; if none does, the node of least bound."""
        entry = next((candidate for candidate in self._heap if suits(candidate[2])), self._heap[0])
        self._heap.remove(entry)
        heapify(self._heap)
        return entry[2]

    def least_bound(self) -> float:
        """Infinite if there is no node."""
        cut = (part.objective for _, parts in self.cut for part in parts)
        return min([*(bound for bound, *_ in self._heap), *cut], default=math.inf)

    def clear(self) -> None:
        self._heap.clear()
        self.cut.clear()
