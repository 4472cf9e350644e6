"""Records of rows of a program by their meaning: such rows change with bounds of counts, or with columns left out.

The number r of blocks out of m that recompute is an integer variable (a count) with two 0/1 indicators::

    q = 1 if any block recomputes         m q - r >= 0
    k = 1 if any block does not           m k + r >= m

Within narrower bounds of r both rows can be tightened, which `solver.linear.matrix` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from autopar.solver.linear.terms import Array


class Count(NamedTuple):
    """The number of blocks that recompute at a given level or a higher one; branch and bound branches on it."""

    variable: int  # r
    indicator: int  # q


class Indicator(NamedTuple):
    """A row that couples a count with one of its indicators."""

    row: int
    blocks: int  # r
    indicator: int  # q or k


class Flows(NamedTuple):
    """The flows from the choices of a tensor's source to the choices of one use: a transport problem.

    The arrays have one length: each variable, with the row of its source and the row of its target.
    """

    variables: Array
    source_rows: Array
    target_rows: Array


class Implied(NamedTuple):
    """Rows `parent >= child + ...` that are redundant if `child` is 0; arrays of one length."""

    rows: Array
    child: Array
    parent: Array
    is_bare: bool  # the rows have no terms but these two


class Opened(NamedTuple):
    """A 0/1 variable that is 1 if any flow uses a bucket, and the variable `missing`: the number of `latencies` that
    the bucket then costs, less those that its flows pay."""

    variable: int
    missing: int
    latencies: float


class CountProducts(NamedTuple):
    """Variables z = t * s, where t is a sum of counts, and s is a sum of 0/1 variables that is itself 0 or 1.

    Linearised (McCormick 1976): `rows` are z <= most * s, and `floors` are z >= least * s, where `least` is 0 unless
    the counts are bounded from below.
    """

    rows: Array
    floors: Array
    z: Array
    ones: Array  # the 0/1 variables of all z, concatenated
    owner: Array  # for each of `ones`, the index of its z
    times: dict[int, float]  # t: the coefficient of each count
    most: float  # the largest value of t


@dataclass
class Records:
    """All records of a program."""

    counts: list[Count] = field(default_factory=list)  # branch and bound branches on these first
    nested_counts: list[list[Count]] = field(default_factory=list)  # chains in which no count exceeds the one before
    any_rows: list[Indicator] = field(default_factory=list)  # m q - r >= 0
    rest_rows: list[Indicator] = field(default_factory=list)  # m k + r >= m
    products: list[CountProducts] = field(default_factory=list)
    flows: list[Flows] = field(default_factory=list)
    implied_rows: list[Implied] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)

    def of_part(self, inside: Array, place: Array, line: Array) -> Records:
        """The records of a part of the program. `inside`: the columns that the part has; `place`, `line`: the numbers
        of columns and rows in the part."""
        return Records(
            counts=_counts(self.counts, place),
            nested_counts=[_counts(chain, place) for chain in self.nested_counts],
            any_rows=_indicators(self.any_rows, place, line),
            rest_rows=_indicators(self.rest_rows, place, line),
            products=[_product(product, inside, place, line) for product in self.products],
            flows=[_flows(flows, inside, place, line) for flows in self.flows],
            implied_rows=[_implied(implied, inside, place, line) for implied in self.implied_rows],
            opened=[Opened(int(place[b]), int(place[e]), n) for b, e, n in self.opened if inside[b]],
        )


def _counts(counts: Sequence[Count], place: Array) -> list[Count]:
    return [Count(int(place[r]), int(place[q])) for r, q in counts]


def _indicators(rows: Sequence[Indicator], place: Array, line: Array) -> list[Indicator]:
    return [Indicator(int(line[row]), int(place[count]), int(place[indicator])) for row, count, indicator in rows]


def _flows(flows: Flows, inside: Array, place: Array, line: Array) -> Flows:
    has = inside[flows.variables]
    return Flows(place[flows.variables[has]], line[flows.source_rows[has]], line[flows.target_rows[has]])


def _implied(implied: Implied, inside: Array, place: Array, line: Array) -> Implied:
    has = inside[implied.child]
    return Implied(line[implied.rows[has]], place[implied.child[has]], place[implied.parent[has]], implied.is_bare)


def _product(product: CountProducts, inside: Array, place: Array, line: Array) -> CountProducts:
    has = inside[product.z]
    ones = inside[product.ones] & has[product.owner]
    return CountProducts(
        line[product.rows[has]],
        line[product.floors[has]],
        place[product.z[has]],
        place[product.ones[ones]],
        (np.cumsum(has) - 1)[product.owner[ones]],
        {int(place[v]): c for v, c in product.times.items()},
        product.most,
    )
