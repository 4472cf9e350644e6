"""Reduced-cost fixing: a program without the variables that no solution up to a cost limit can use.

Let L be the optimum of a relaxation. A solution in which a variable of reduced cost d is 1 costs at least L + d, so a
variable is fixed to 0 if L + d exceeds the limit. This fixes others: a row equates a sum of choices with a sum of
flows, so if all its flows are 0, the choices are 0 too, then the other flows of these choices, and so on. Few variables
are left, so that relaxations need no column generation and are solved many times faster.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from autopar.solver.linear.highs import Basis
from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.outcome import Outcome
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array, Entries


@dataclass(frozen=True)
class Shrunk:
    """A part of a program; `columns` and `lines`: the numbers that its columns and rows have in the whole program."""

    program: Program
    columns: Array
    lines: Array

    def basis(self, whole: Basis) -> Basis:
        """A basis of the whole program, restricted to the part."""
        columns, of_columns, lines, of_lines = whole
        has_column, has_line = np.isin(columns, self.columns), np.isin(lines, self.lines)
        places = np.searchsorted(self.columns, columns[has_column]), np.searchsorted(self.lines, lines[has_line])
        return places[0], of_columns[has_column], places[1], of_lines[has_line]

    def of_whole(self, basis: Basis) -> Basis:
        """A basis of the part, in the numbers of the whole program."""
        columns, of_columns, lines, of_lines = basis
        return self.columns[columns], of_columns, self.lines[lines], of_lines


def within(program: Program, root: Outcome, limit: float) -> Array:
    """The variables that solutions of at most this cost can use, in order; `root`: the program's relaxation."""
    matrix = program.matrix()
    matrix.bound({})
    required = required_of(program)
    kept = without_zeros(matrix, required | (root.objective + root.reduced <= limit), required)
    return np.flatnonzero(matrix.with_dependents(kept))


def required_of(program: Program) -> Array:
    """Whether each variable must be in every part of a program, whatever its reduced cost, with the matrix's bounds."""
    matrix = program.matrix()
    required: Array = (matrix.lower != 0) | ~matrix.whole
    required[[v for count in program.records.counts for v in count]] = True
    required[[v for row in program.records.rest_rows for v in (row.blocks, row.indicator)]] = True
    return required


def part_of(program: Program, kept: Array) -> Shrunk:
    """The program of the `kept` variables, numbered in their order; the others are 0.

    `kept` must contain the dependent columns of each of its variables (`Matrix.with_dependents`).
    """
    inside = np.zeros(len(program.names), dtype=bool)
    inside[kept] = True
    place = np.cumsum(inside) - 1
    matrix = program.matrix()
    matrix.bound({})  # its values are then those of the program's own bounds
    entries_inside = np.flatnonzero(inside[matrix.column])
    row, column, value = matrix.row[entries_inside], matrix.column[entries_inside], matrix.value[entries_inside]
    needed = (matrix.least > 0) | (matrix.most < 0)
    needed[row] = True
    for implied in program.records.implied_rows:
        needed[implied.rows[~inside[implied.child]]] = False
    for product in program.records.products:
        outside = ~inside[product.z]
        needed[product.rows[outside]] = needed[product.floors[outside]] = False
    line = np.cumsum(needed) - 1
    entries, in_part = Entries(), needed[row]
    entries.add(line[row[in_part]], place[column[in_part]], value[in_part])
    part = Program(
        names=[program.names[v] for v in kept],
        lower=array("d", matrix.lower[kept].tobytes()),
        upper=array("d", matrix.upper[kept].tobytes()),
        integer=bytearray(matrix.integer[kept].tobytes()),
        whole=bytearray(matrix.whole[kept].tobytes()),
        cost=program.cost[kept],
        rows=[program.rows[i] for i in np.flatnonzero(needed)],
        entries=entries,
        budget=None if program.budget is None else int(place[program.budget]),
        records=program.records.of_part(inside, place, line),
    )
    return Shrunk(part, kept, np.flatnonzero(needed))


def without_zeros(matrix: Matrix, kept: Array, held: Array) -> Array:
    """`kept` without the variables that rows of right side 0 force to 0, over and over; those `held` stay."""
    kept = kept.copy()
    entries = np.flatnonzero(kept[matrix.column] & (matrix.value != 0))
    row, column, positive = matrix.row[entries], matrix.column[entries], matrix.value[entries] > 0
    above, below = matrix.upper[column] > 0, matrix.lower[column] < 0
    up, down = np.where(positive, above, below), np.where(positive, below, above)
    while True:
        rises = np.bincount(row, up, minlength=matrix.lines) > 0
        falls = np.bincount(row, down, minlength=matrix.lines) > 0
        none_up, none_down = (matrix.least >= 0) & ~rises, (matrix.most <= 0) & ~falls
        forced = ~held[column] & ((down & none_up[row]) | (up & none_down[row]))
        if not forced.any():
            return kept
        kept[column[forced]] = False
        is_left = kept[column]
        row, column, up, down = row[is_left], column[is_left], up[is_left], down[is_left]
