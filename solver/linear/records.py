"""Records of rows of a program by their meaning: such rows change with bounds of counts, or with columns left out.

The number r of blocks out of m that recompute is an integer variable (a count) with two 0/1 indicators::

    q = 1 if any block recomputes         m q - r >= 0
    k = 1 if any block does not           m k + r >= m

Within narrower bounds of r both rows can be tightened, which `solver.linear.matrix` does.
"""

from __future__ import annotations

from typing import NamedTuple

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
