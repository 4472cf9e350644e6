"""Rows of a program that are remembered by what they say, since other bounds or columns left out change them.

A count r of m blocks that recompute is an integer variable with two indicators, 0/1 variables::

    q = 1 if any block recomputes         m q - r >= 0
    k = 1 if any block does not           m k + r >= m

Within narrower bounds of r both rows can be tightened; `solver.linear.matrix` does.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.solver.linear.terms import Array


class Count(NamedTuple):
    """A count of blocks that recompute at a level or a higher one, which branch and bound branches on."""

    variable: int  # r
    indicator: int  # q


class Indicator(NamedTuple):
    """A row that couples a count with an indicator of it."""

    row: int
    blocks: int  # r
    indicator: int  # q or k


class Flows(NamedTuple):
    """Variables that carry choices of a tensor's source to choices of one use: a transport problem.

    All arrays are as long as `variables`: the rows in which each one's source and target sum up.
    """

    variables: Array
    source_rows: Array
    target_rows: Array


class Implied(NamedTuple):
    """Rows `big >= small + ...`, which say nothing where `small` is 0; arrays of one length."""

    rows: Array
    small: Array
    big: Array
    is_bare: bool  # the rows have no terms but these two


class Opened(NamedTuple):
    """A 0/1 variable that is 1 where any of some flows is, and what is `missing` then: `many` less what these pay."""

    variable: int
    missing: int
    many: float


class CountProducts(NamedTuple):
    """Variables z = t * s: t is a sum of counts, s a sum of 0/1 variables that is itself 0 or 1.

    Linearised (McCormick 1976): `rows` z <= most * s, and `floors` z >= least * s, where `least` is 0 unless bounds of
    the counts say more.
    """

    rows: Array
    floors: Array
    z: Array
    ones: Array  # the 0/1 variables of all z, one behind the other
    owner: Array  # of each of these, the place of its z
    times: dict[int, float]  # t, by count
    most: float  # the largest that t can be
