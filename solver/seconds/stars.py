"""What a tensor's conversions cost, as one function of how it lies at its source and how each of its uses wants it.

Uses that want the same share a conversion, so that of a tensor that lies as p

    c(p, w_1 .. w_K) = sum_k own_k(p, w_k) + sum over the different w among w_1 .. w_K of price(p, w)

Its least value under messages m, by what one end is, is asked for again and again. Which uses want the same is tried:
a set T of them pays min_w price(p, w) + sum_{k in T} (own_k(p, w) - m_k(w)), and sets add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.linear.terms import Array

MOST = 3
"""Uses of a star: of more, 2^K sets would be looked at."""
_NEVER = 1e30
"""Seconds of what has no way: with infinite ones there were sums of both infinities."""


@dataclass
class Arm:
    """An end of a star: op number `op`, whose choice i is `of[i]` here; `message`: by what the end is, -inf where no
    choice is."""

    op: int
    of: Array
    message: Array
    own: Array | None = None  # what this use pays alone, by row and column

    @staticmethod
    def of_choices(op: int, choices: Sequence[Sequence[int]], places: Iterable[int], many: int) -> Arm:
        """An end that is at one of some places, of `many`, by which of the lists an op's choice is in."""
        of, message = np.zeros(sum(map(len, choices)), dtype=np.int64), np.full(many, -np.inf)
        for some, place in zip(choices, places, strict=True):
            of[list(some)], message[place] = place, 0.0
        return Arm(op, of, message)

    def give(self, least: Array) -> Array:
        """Hand the op all that the star's ends differ in: its least cost less other messages; by choice."""
        self.message = np.where(np.isneginf(self.message), -np.inf, np.minimum(least, _NEVER))
        return self.message[self.of]

    def costs(self, least: Array) -> Array:
        """By choice, what the star costs at least with it."""
        return np.minimum(least, _NEVER)[self.of]

    def fix(self, choice: int) -> None:
        """Let the op make this choice."""
        self.message = np.where(np.arange(len(self.message)) == self.of[choice], 0.0, -np.inf)

    def take(self, more: Array) -> None:
        """Hand an op's cost, by choice, to the star, as far as no choice has less."""
        least = np.full(len(self.message), np.inf)
        np.minimum.at(least, self.of, more)
        self.message = self.message - np.where(np.isinf(least), 0.0, least)


@dataclass
class Star:
    """One tensor's price (inf where there is no way), by how it lies (rows) and how it is wanted (columns).

    `arms`: of the source, then of the uses. The star's own part of a bound is its cost less the messages.
    """

    price: Array
    arms: list[Arm]
    _sums: dict[tuple[int, ...], Array] = field(default_factory=dict)

    @property
    def uses(self) -> int:
        return len(self.arms) - 1

    @property
    def says(self) -> bool:
        """Whether anything has a price."""
        return bool(self.price.any()) or any(arm.own is not None for arm in self.arms)

    def least(self, end: int) -> Array:
        """The least of cost less the other ends' messages, by what one end is."""
        if self.uses == 1:
            other = self.arms[1 - end].message
            return (self._cost([0]) - (other[:, None] if end else other)).min(axis=1 - end)
        return self._by_row(range(self.uses)) if end == 0 else self._by_column(end - 1)

    def bound(self) -> float:
        """The least of cost less all messages."""
        return float((self.least(0) - self.arms[0].message).min())

    def _by_row(self, uses: Sequence[int]) -> Array:
        """By row, the least that some uses cost together, less their messages."""
        if not uses:
            return np.zeros(len(self.price))
        first, *others = uses
        found = np.full(len(self.price), np.inf)
        for some in _subsets(others):
            left = [k for k in others if k not in some]
            found = np.minimum(found, self._together([first, *some]) + self._by_row(left))
        return found

    def _together(self, some: list[int]) -> Array:
        """By row, the least that uses which want the same cost, less their messages."""
        messages = sum(self.arms[1 + k].message for k in some)
        return np.asarray((self._cost(some) - messages).min(axis=1))

    def _by_column(self, use: int) -> Array:
        others = [k for k in range(self.uses) if k != use]
        found = np.full(self.price.shape[1], np.inf)
        for some in _subsets(others):
            rows = self._by_row([k for k in others if k not in some]) - self.arms[0].message
            least = (self._cost([use, *some]) + rows[:, None]).min(axis=0)
            for k in some:
                least = least - self.arms[1 + k].message
            found = np.minimum(found, least)
        return found

    def _cost(self, some: list[int]) -> Array:
        """What uses that want the same cost, by row and column."""
        paying = tuple(k for k in sorted(some) if self.arms[1 + k].own is not None)
        if paying not in self._sums:
            own: list[Array] = [self.arms[1 + k].own for k in paying]
            self._sums[paying] = sum(own, self.price)
        return self._sums[paying]


def _subsets(of: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for one in of:
        found += [[*some, one] for some in found]
    return found
