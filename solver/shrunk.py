"""A program without the variables that no solution up to a limit can use.

From a relaxation with optimum L: a variable of reduced cost d that is 1 costs at least L + d. What goes for that reason
takes others along: where a row says that a sum of choices is a sum of flows and all flows are gone, the choices go too,
then the other flows of these choices, and so on. Few of the program's variables are left, so that its relaxations need
no columns to be priced and are solved many times faster.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.held import Basis
from autopar.solver.linear import Array, Entries
from autopar.solver.matrix import Matrix
from autopar.solver.outcome import Outcome
from autopar.solver.program import Product, Program


@dataclass(frozen=True)
class Shrunk:
    """A part of a program, with the numbers that its columns and lines have there, in order."""

    program: Program
    columns: Array
    lines: Array

    def basis(self, whole: Basis) -> Basis:
        """What a basis of the program says of the part."""
        columns, of_columns, lines, of_lines = whole
        mine, its = np.isin(columns, self.columns), np.isin(lines, self.lines)
        places = np.searchsorted(self.columns, columns[mine]), np.searchsorted(self.lines, lines[its])
        return places[0], of_columns[mine], places[1], of_lines[its]

    def of_whole(self, basis: Basis) -> Basis:
        """A basis of the part as one of the program."""
        columns, of_columns, lines, of_lines = basis
        return self.columns[columns], of_columns, self.lines[lines], of_lines


def within(program: Program, root: Outcome, limit: float) -> Array:
    """The variables, in order, that solutions of at most this cost can use; `root`: the program's relaxation."""
    matrix = program.matrix()
    matrix.bound({})
    held = held_of(program)
    kept = without_zeros(matrix, held | (root.objective + root.reduced <= limit), held)
    return np.flatnonzero(matrix.with_company(kept))


def held_of(program: Program) -> Array:
    """Whether a variable is in every part of a program, whatever it costs; of the bounds that its matrix has."""
    matrix = program.matrix()
    held: Array = (matrix.lower != 0) | ~matrix.whole
    held[[v for pair in (*program.early, *(pair for _, *pair in program.kept)) for v in pair]] = True
    return held


def part_of(program: Program, kept: Array) -> Shrunk:
    """The program of these variables, numbered in their order; the others are 0.

    They have to be kept together with what is there for their sake (`Matrix.with_company`).
    """
    inside = np.zeros(len(program.names), dtype=bool)
    inside[kept] = True
    place = np.cumsum(inside) - 1
    matrix = program.matrix()
    matrix.bound({})  # its values are then those that the rows were made with
    some = np.flatnonzero(inside[matrix.column])
    row, column, value = matrix.row[some], matrix.column[some], matrix.value[some]
    needed = (matrix.least > 0) | (matrix.most < 0)
    needed[row] = True
    for rows, small, *_ in program.implied:
        needed[rows[~inside[small]]] = False
    for rows, floors, z, *_ in program.products:
        needed[rows[~inside[z]]] = needed[floors[~inside[z]]] = False
    line = np.cumsum(needed) - 1
    entries, there = Entries(), needed[row]
    entries.many(line[row[there]], place[column[there]], value[there])
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
        early=_placed(program.early, place),
        some=[(int(line[row]), int(place[count]), int(place[q])) for row, count, q in program.some],
        kept=[(int(line[row]), int(place[count]), int(place[k])) for row, count, k in program.kept],
        nested=[_placed(chain, place) for chain in program.nested],
        products=[_product(one, inside, place, line) for one in program.products],
        flows=[
            (place[flows[inside[flows]]], line[out[inside[flows]]], line[into[inside[flows]]])
            for flows, out, into in program.flows
        ],
        implied=[
            (line[rows[inside[small]]], place[small[inside[small]]], place[big[inside[small]]], alone)
            for rows, small, big, alone in program.implied
        ],
    )
    return Shrunk(part, kept, np.flatnonzero(needed))


def _placed(pairs: Sequence[tuple[int, int]], place: Array) -> list[tuple[int, int]]:
    return [(int(place[one]), int(place[other])) for one, other in pairs]


def _product(product: Product, inside: Array, place: Array, line: Array) -> Product:
    rows, floors, z, ones, owner, times, most = product
    mine, some = inside[z], inside[ones] & inside[z][owner]
    number = np.cumsum(mine) - 1
    times = {int(place[v]): c for v, c in times.items()}
    return line[rows[mine]], line[floors[mine]], place[z[mine]], place[ones[some]], number[owner[some]], times, most


def without_zeros(matrix: Matrix, kept: Array, held: Array) -> Array:
    """Without what rows of right side 0 leave no other value, but for what is `held`."""
    kept = kept.copy()
    some = np.flatnonzero(kept[matrix.column] & (matrix.value != 0))
    row, column, positive = matrix.row[some], matrix.column[some], matrix.value[some] > 0
    above, below = matrix.upper[column] > 0, matrix.lower[column] < 0
    up, down = np.where(positive, above, below), np.where(positive, below, above)
    while True:
        rises = np.bincount(row, up, minlength=matrix.lines) > 0
        falls = np.bincount(row, down, minlength=matrix.lines) > 0
        none_up, none_down = (matrix.least >= 0) & ~rises, (matrix.most <= 0) & ~falls
        gone = ~held[column] & ((down & none_up[row]) | (up & none_down[row]))
        if not gone.any():
            return kept
        kept[column[gone]] = False
        there = kept[column]
        row, column, up, down = row[there], column[there], up[there], down[there]
