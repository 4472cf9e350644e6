"""Boxes of counts: which counts are open, and how boxes are split.

A box has a lower and an upper bound for each count of blocks that recompute. Both bounds enter the linearised products
of counts and choices, so these are more exact in the parts of a box than in the box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.solver.linear.outcome import INTEGRALITY, Bounds, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array


class Boxes:
    """The boxes of a program's counts."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def range(self, counts: Bounds, count: int) -> tuple[float, float]:
        """The bounds of a count in a box; the count's own bounds if the box has none for it."""
        return counts.get(count, (self.program.lower[count], self.program.upper[count]))

    def at(self, values: Mapping[int, float]) -> Bounds:
        """The box in which the counts are fixed to these values."""
        bounds: dict[int, tuple[float, float]] = {}
        for count, whether in self.program.records.counts:
            bounds |= {whether: (min(values[count], 1.0),) * 2, count: (values[count],) * 2}
        return self._with_kept(bounds)

    def are_possible(self, values: Mapping[int, float]) -> bool:
        """Whether the counts can have these values: each within its bounds, and none larger than the one before it in a
        chain of nested counts."""
        within = all(low <= values[count] <= high for count in values for low, high in [self.range({}, count)])
        chains = [[values[count] for count, _ in chain] for chain in self.program.records.nested_counts]
        return within and all(chain == sorted(chain, reverse=True) for chain in chains)

    def is_fixed(self, counts: Bounds) -> bool:
        """Whether every count is fixed."""
        ranges = [self.range(counts, count) for count, _ in self.program.records.counts]
        return all(low == high for low, high in ranges)

    def open(self, counts: Bounds) -> list[tuple[int, int]]:
        """The counts that are not fixed, each with its indicator (1 if any block recomputes)."""
        return [pair for pair in self.program.records.counts if len(set(self.range(counts, pair[0]))) > 1]

    def split(self, node: Outcome, fixed: float | None = None) -> Iterator[Bounds]:
        """Split a box by the count whose products have the largest errors, at the count's value in the relaxation.

        If this value is whole, one part fixes the count to it, as fixed counts give solutions. Otherwise a count that
        may be 0 is split into 0 and at least 1. `fixed`: the first part fixes the count in any case, to its value in
        the relaxation less `fixed`, rounded up.
        """
        open_counts = self.open(node.counts)
        if not open_counts:
            return
        wrong = self.program.wrong_products(node.values)

        def gained(pair: tuple[int, int]) -> float:
            """The errors of a count's products; less if the split is between 0 and 1 and the count is near its largest,
            where such a split changes little."""
            low, high = self.range(node.counts, pair[0])
            part = 1.0 if low or fixed is not None else 1 - node.values[pair[0]] / (1 + high)
            return part * (wrong.get(pair[0], 0.0) + wrong.get(pair[1], 0.0))

        count, whether = max(open_counts, key=gained)
        low, high = self.range(node.counts, count)
        value = min(max(node.values[count], low), high)
        near = float(round(value))
        if fixed is not None and abs(value - near) >= INTEGRALITY:
            near = min(high, float(math.ceil(value - fixed)))
        if fixed is not None or abs(value - near) < INTEGRALITY:
            parts = [(near, near), (low, near - 1), (near + 1, high)]
        elif low == 0:
            parts = [(1.0, high), (0.0, 0.0)]
        else:
            parts = [(low, float(math.floor(value))), (float(math.ceil(value)), high)]
        for part in parts:
            if (box := self._with(node.counts, count, whether, part)) is not None:
                yield box

    def _with(self, counts: Bounds, count: int, whether: int, part: tuple[float, float]) -> Bounds | None:
        """A box in which one more count is bounded, and so are the counts nested with it; None if that box is empty."""
        if part[0] > part[1]:
            return None
        bounds = {**counts, whether: (min(part[0], 1.0), min(part[1], 1.0)), count: part}
        for chain in self.program.records.nested_counts:
            places = [i for i, (nested, _) in enumerate(chain) if nested == count]
            for place in places:
                for i, (other, its) in enumerate(chain):
                    low, high = self.range(bounds, other)
                    low, high = (max(low, part[0]), high) if i < place else (low, min(high, part[1]))
                    if low > high:
                        return None
                    if (low, high) != self.range(bounds, other) or low == high:
                        bounds |= {its: (min(low, 1.0), min(high, 1.0)), other: (low, high)}
        return self._with_kept(bounds)

    def _with_kept(self, counts: Bounds) -> Bounds:
        """A box with the indicator k fixed to 1 for each count whose upper bound is below the number of blocks: some
        block does not recompute then."""
        rows = self.program.records.rest_rows
        below = [k for _, count, k in rows if self.range(counts, count)[1] < self.range({}, count)[1]]
        return {**counts, **dict.fromkeys(below, (1.0, 1.0))}


def holds(bounds: Bounds, values: Array) -> bool:
    """Whether the values of a program's variables lie within a box."""
    return all(low - INTEGRALITY <= values[v] <= high + INTEGRALITY for v, (low, high) in bounds.items())
