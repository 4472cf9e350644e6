"""The cost of a tensor's conversions as one function: of its layout p at the source and the layout w_k that each use k
wants.

Uses that want the same layout share a conversion, so the cost is

    c(p, w_1 .. w_K) = sum_k own_k(p, w_k) + sum over the different w among w_1 .. w_K of price(p, w)

The message passing needs the least value of c minus the messages m of the other ends, for each value at one end. It is
found by trying all partitions of the uses into sets that want the same layout: a set T costs
min_w price(p, w) + sum_{k in T} (own_k(p, w) - m_k(w)), and the costs of the sets add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.linear.terms import Array

MOST = 3
"""Largest number of uses of a star: the sets of uses that are tried grow as 2^K."""
_NEVER = 1e30
"""Seconds of an impossible conversion: with infinity, sums of both infinities occurred."""


@dataclass
class Arm:
    """An end of a star: op number `op`, whose choice i means the layout `of[i]` here; `message`: by layout, -inf if no
    choice has the layout."""

    op: int
    of: Array
    message: Array
    own: Array | None = None  # what this use pays alone, by layout at the source and wanted layout

    @staticmethod
    def of_choices(op: int, choices: Sequence[Sequence[int]], places: Iterable[int], layouts: int) -> Arm:
        """An end with so many `layouts`: the choices in each of the lists mean the layout at the list's place."""
        of, message = np.zeros(sum(map(len, choices)), dtype=np.int64), np.full(layouts, -np.inf)
        for of_layout, place in zip(choices, places, strict=True):
            of[list(of_layout)], message[place] = place, 0.0
        return Arm(op, of, message)

    def give(self, least: Array) -> Array:
        """Pass the star's minima by layout at this end, `least`, to the op: they become the message; returned by
        choice.
        """
        self.message = np.where(np.isneginf(self.message), -np.inf, np.minimum(least, _NEVER))
        return self.message[self.of]

    def costs(self, least: Array) -> Array:
        """The star's minima by layout at this end, `least`, by choice of the op."""
        return np.minimum(least, _NEVER)[self.of]

    def fix(self, choice: int) -> None:
        """Fix the end to the layout of this choice."""
        self.message = np.where(np.arange(len(self.message)) == self.of[choice], 0.0, -np.inf)

    def take(self, cost: Array) -> None:
        """Pass an op's cost by choice on to the star: for each layout the least cost of its choices."""
        least = np.full(len(self.message), np.inf)
        np.minimum.at(least, self.of, cost)
        self.message = self.message - np.where(np.isinf(least), 0.0, least)


@dataclass
class Star:
    """One tensor's prices by layout at the source (rows) and wanted layout (columns), inf if impossible.

    `arms`: the source's, then those of the uses. The star's part of the bound is its least cost minus all messages.
    """

    price: Array
    arms: list[Arm]
    _sums: dict[tuple[int, ...], Array] = field(default_factory=dict)

    @property
    def uses(self) -> int:
        return len(self.arms) - 1

    @property
    def costs_something(self) -> bool:
        """Whether any conversion costs something."""
        return bool(self.price.any()) or any(arm.own is not None for arm in self.arms)

    def least(self, end: int) -> Array:
        """The least cost minus the messages of the other ends, by layout at one end."""
        if self.uses == 1:
            other = self.arms[1 - end].message
            return (self._cost([0]) - (other[:, None] if end else other)).min(axis=1 - end)
        return self._by_row(range(self.uses)) if end == 0 else self._by_column(end - 1)

    def bound(self) -> float:
        """The least cost minus all messages."""
        return float((self.least(0) - self.arms[0].message).min())

    def _by_row(self, uses: Sequence[int]) -> Array:
        """By row, the least cost of some uses minus their messages, over all partitions of the uses."""
        if not uses:
            return np.zeros(len(self.price))
        first, *others = uses
        least = np.full(len(self.price), np.inf)
        for joined in _subsets(others):
            remaining = [k for k in others if k not in joined]
            least = np.minimum(least, self._together([first, *joined]) + self._by_row(remaining))
        return least

    def _together(self, uses: list[int]) -> Array:
        """By row, the least cost of uses that all want the same layout, minus their messages."""
        messages = sum(self.arms[1 + k].message for k in uses)
        return np.asarray((self._cost(uses) - messages).min(axis=1))

    def _by_column(self, use: int) -> Array:
        """By the layout that one use wants, the least cost minus the messages of the other ends."""
        others = [k for k in range(self.uses) if k != use]
        cost = np.full(self.price.shape[1], np.inf)
        for joined in _subsets(others):
            rows = self._by_row([k for k in others if k not in joined]) - self.arms[0].message
            least = (self._cost([use, *joined]) + rows[:, None]).min(axis=0)
            for k in joined:
                least = least - self.arms[1 + k].message
            cost = np.minimum(cost, least)
        return cost

    def _cost(self, uses: list[int]) -> Array:
        """The cost of uses that all want the same layout, by row and column."""
        paying = tuple(k for k in sorted(uses) if self.arms[1 + k].own is not None)
        if paying not in self._sums:
            own: list[Array] = [self.arms[1 + k].own for k in paying]
            self._sums[paying] = sum(own, self.price)
        return self._sums[paying]


def _subsets(of: list[int]) -> list[list[int]]:
    subsets: list[list[int]] = [[]]
    for member in of:
        subsets += [[*subset, member] for subset in subsets]
    return subsets
