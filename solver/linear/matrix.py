"""A program as numpy arrays, and which of its columns and rows a relaxation may leave out.

Most flows of a program are 0 in every good plan. If a flow is left out, so are the columns that exist only for its sake
(the conversion that it pays, its count of replays) and the rows that are redundant while it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.solver.linear.terms import Array

if TYPE_CHECKING:
    from autopar.solver.linear.program import Program
    from autopar.solver.linear.records import Indicator


@dataclass(frozen=True)
class Implications:
    """Rows `parent >= child + ...` that are redundant if `child` is 0, as of a flow and the conversion that it pays.

    `is_bare`: rows with no terms but these two. `child_is_parent`: rows whose child is the parent of another row.
    `batch`: rows of one batch share neither a child nor a parent, so that they can be processed together.
    """

    rows: Array
    child: Array
    parent: Array
    is_bare: Array
    child_is_parent: Array
    batch: Array

    def levels(self) -> tuple[Array, Array]:
        """The rows as indices into these arrays, in two levels: those whose children are flows, then the others."""
        return np.flatnonzero(~self.child_is_parent), np.flatnonzero(self.child_is_parent)


@dataclass(frozen=True)
class Products:
    """Rows `z <= most * sum(ones)`, where z is a sum of counts (`times[kind]`) times the sum of `ones`.

    `floors`: rows `z >= least * sum(ones)`, redundant unless the counts are bounded from below. `owner`: for each of
    `ones`, the index of its row in `rows`; `entries`, `floor_entries`: the indices of its matrix entries.
    """

    rows: Array
    floors: Array
    z: Array
    most: Array
    kind: Array
    times: Sequence[Mapping[int, float]]
    ones: Array
    owner: Array
    entries: Array
    floor_entries: Array

    def within(self, bounds: Mapping[int, tuple[float, float]]) -> tuple[Array, Array]:
        """The least and the largest slope (value of the sum of counts) of each row within these bounds of counts."""
        ranges = [spread(times, bounds) or (0.0, math.inf) for times in self.times]
        low, high = (np.array(ends, dtype=float) for ends in ([r[0] for r in ranges], [r[1] for r in ranges]))
        most = np.minimum(self.most, high[self.kind])
        return np.clip(low[self.kind], 0.0, most), most


class Part:
    """Some columns and rows of a matrix; `entries`: indices of their matrix entries, row by row; `index`: the column of
    each entry, numbered within the part."""

    def __init__(self, matrix: Matrix, inside: Array, rows: Array) -> None:
        self.matrix = matrix
        self.columns, self.rows = np.flatnonzero(inside), np.flatnonzero(rows)
        self.entries = np.flatnonzero(rows[matrix.row] & inside[matrix.column] & (matrix.value != 0))
        self.lengths = np.bincount(matrix.row[self.entries], minlength=matrix.lines)[self.rows]
        self.index = (np.cumsum(inside) - 1)[matrix.column[self.entries]]

    def lines(self) -> Iterator[tuple[list[int], list[float], float, float]]:
        """For each row: the columns and values of its entries, its lower and its upper bound."""
        index, values = self.index.tolist(), self.matrix.value[self.entries].tolist()
        start = 0
        for length, row in zip(self.lengths.tolist(), self.rows, strict=True):
            stop = start + length
            yield index[start:stop], values[start:stop], float(self.matrix.least[row]), float(self.matrix.most[row])
            start = stop


class Matrix:
    """A program's entries sorted by row, bounds and costs, and what a relaxation may leave out (`optional`)."""

    def __init__(self, program: Program) -> None:
        self.columns, self.lines = len(program.names), len(program.rows)
        self.row, self.column, self.value = program.entries.arrays(added_up=program.shared_columns.shares)
        self.lower, self.upper = np.array(program.lower), np.array(program.upper)
        self.integer, self.whole = (np.frombuffer(bytes(flags), bool) for flags in (program.integer, program.whole))
        self.cost = np.zeros(self.columns)
        self.guide: Array | None = None  # costs by which the first columns are chosen, if not `cost`
        senses = np.array([sense for _, sense, _ in program.rows])
        right = np.array([right for *_, right in program.rows], dtype=float)
        self.least, self.most = np.where(senses >= 0, right, -np.inf), np.where(senses <= 0, right, np.inf)
        self._own = self.lower.copy(), self.upper.copy()
        self.implications = _implications(program)
        self.products = _products(program, np.searchsorted(self.row, np.arange(self.lines)))
        self.flows = np.stack(_joined(program.records.flows, 3), axis=1)
        self.end_rows, self.end_choices = self._ends()
        lengths = [len(flows.variables) for flows in program.records.flows]
        self._uses = np.repeat(np.arange(len(lengths)), lengths)
        self.optional = self._optional()
        self.dormant = np.zeros(self.lines, dtype=bool)  # rows that are redundant if their variable is left out
        for rows, of in ((self.implications.rows, self.implications.child), (self.products.rows, self.products.z)):
            self.dormant[rows[self.optional[of]]] = True
        self.dormant[self.products.floors] = True
        self._any, self._rest = self._indicators(program.records.any_rows), self._indicators(program.records.rest_rows)
        self.slopes = np.zeros(len(self.products.rows))  # lower bound of the sum of counts in each product
        self.floored = self.slopes > 0  # whether the product needs its floor row

    def bound(self, bounds: Mapping[int, tuple[float, float]]) -> None:
        """Apply the bounds of a box, all other variables having their own, and tighten the rows of counts."""
        self.lower[:], self.upper[:] = self._own
        for variable, (low, high) in bounds.items():
            self.lower[variable], self.upper[variable] = low, high
        (q, its_count), (k, their_count) = self._any, self._rest
        self.value[q], self.value[k] = self.upper[its_count], self.least[self.row[k]] - self.lower[their_count]
        products = self.products
        self.slopes, most = products.within(bounds)
        self.value[products.entries] = -most[products.owner]
        self.value[products.floor_entries] = -self.slopes[products.owner]
        self.least[products.rows] = np.where(self.slopes == most, 0.0, -np.inf)
        self.floored = (self.slopes > 0) & (self.slopes < most)

    def part(self, columns: Array) -> Part:
        """Some columns, with all rows that restrict them and all rows that are violated if every variable is 0."""
        inside = np.zeros(self.columns, dtype=bool)
        inside[columns] = True
        rows = (self.least > 0) | (self.most < 0)
        rows[self.row[inside[self.column] & (self.value != 0)]] = True
        rows[self.implications.rows[~inside[self.implications.child]]] = False
        rows[self.products.floors[~self.floored]] = False
        return Part(self, inside, rows)

    def _indicators(self, rows: Sequence[Indicator]) -> tuple[Array, Array]:
        """The indices of the indicators' matrix entries, and the count of each."""
        places = [np.flatnonzero((self.row == row) & (self.column == indicator)) for row, _, indicator in rows]
        return _joined([(entries,) for entries in places], 1)[0], np.array(
            [count for _, count, _ in rows], dtype=np.int64
        )

    def _ends(self) -> tuple[Array, Array]:
        """The pairs of a row at an end of flows and a choice in that row."""
        of_end, of_flow = np.zeros(self.lines, dtype=bool), np.zeros(self.columns, dtype=bool)
        of_end[self.flows[:, 1:]], of_flow[self.flows[:, 0]] = True, True
        at = np.flatnonzero(of_end[self.row] & ~of_flow[self.column])
        return self.row[at], self.column[at]

    def _optional(self) -> Array:
        """The columns that may be left out: flows, counts of flows only, and columns bounded below by these only."""
        optional = np.zeros(self.columns, dtype=bool)
        optional[self.flows[:, 0]] = True
        needed = np.zeros(self.columns, dtype=bool)
        needed[self.products.z[self.products.owner[~optional[self.products.ones]]]] = True
        optional[self.products.z] = ~needed[self.products.z]
        implications = self.implications
        for level in implications.levels():
            child, parent = implications.child[level], implications.parent[level]
            needed[parent[~optional[child]]] = True
            optional[parent] = ~needed[parent]
        return optional

    def with_dependents(self, inside: Array) -> Array:
        """These columns and those that exist for their sake: the counts of flows and the parents of implications."""
        inside = inside.copy()
        products, implications = self.products, self.implications
        np.logical_or.at(inside, products.z[products.owner], inside[products.ones])
        for level in implications.levels():
            np.logical_or.at(inside, implications.parent[level], inside[implications.child[level]])
        return inside

    def awake(self, inside: Array) -> Array:
        """The rows that a program of these columns needs: without rows that are redundant or have no columns."""
        has_entries = np.zeros(self.lines, dtype=bool)
        has_entries[self.row[inside[self.column]]] = True
        rows = np.ones(self.lines, dtype=bool)
        rows[self.implications.rows] = inside[self.implications.child]
        rows[self.products.rows] = inside[self.products.z]
        rows[self.products.floors] = inside[self.products.z] & self.floored
        return (rows | ~self.dormant) & (has_entries | (self.least > 0) | (self.most < 0))

    def cheapest(self, per_end: int) -> Array:
        """All columns that may not be left out, and for each end of flows the `per_end` cheapest flows there."""
        inside = ~self.optional
        cost, implications = (self.cost if self.guide is None else self.guide).copy(), self.implications
        users = np.bincount(implications.parent, minlength=self.columns)
        for level in reversed(implications.levels()):
            child, parent = implications.child[level], implications.parent[level]
            np.add.at(cost, child, cost[parent] / users[parent])
        return self.with_dependents(inside | self.least_of(cost, per_end))

    def least_by_use(self, values: Array) -> Array:
        """For each use, the least value of its flows, or 0: as flows of a use sum up to one, this bounds their sum."""
        least = np.zeros(int(self._uses.max(initial=-1)) + 1)
        np.minimum.at(least, self._uses, values[self.flows[:, 0]])
        return least

    def least_of(self, cost: Array, per_end: int, among: Array | None = None) -> Array:
        """For each end of flows, the `per_end` flows of least cost that leave or enter it; `among`: only of these."""
        chosen = np.zeros(self.columns, dtype=bool)
        flows, out, into = self.flows.T if among is None else self.flows[among[self.flows[:, 0]]].T
        for ends in (out, into):
            order = np.lexsort((cost[flows], ends))
            sorted_ends = ends[order]
            first = np.searchsorted(sorted_ends, sorted_ends)
            chosen[flows[order[np.arange(len(order)) - first < per_end]]] = True
        return chosen


def _joined(chunks: Sequence[tuple[Array, ...]], fields: int) -> list[Array]:
    """The concatenated arrays of all chunks."""
    none = (np.zeros(0, dtype=np.int64),) * fields
    return [np.concatenate(columns) for columns in zip(none, *(chunk[:fields] for chunk in chunks), strict=True)]


def _implications(program: Program) -> Implications:
    rows, child, parent = _joined(program.records.implied_rows, 3)
    lengths = [len(implied.rows) for implied in program.records.implied_rows]
    is_bare = np.repeat([implied.is_bare for implied in program.records.implied_rows], lengths)
    batch = _ranks(child) * (1 + len(rows)) + _ranks(parent)
    return Implications(rows, child, parent, is_bare.astype(bool), np.isin(child, parent), batch)


def _ranks(keys: Array) -> Array:
    """For each key, the number of equal keys before it."""
    order = np.argsort(keys, kind="stable")
    ranks = np.empty(len(keys), dtype=np.int64)
    ordered = keys[order]
    ranks[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
    return ranks


def _products(program: Program, starts: Array) -> Products:
    """`starts`: the index of each row's first entry."""
    rows, floors, z, ones, _ = _joined(program.records.products, 5)
    kinds: dict[tuple[tuple[int, float], ...], int] = {}
    kind = [kinds.setdefault(tuple(product.times.items()), len(kinds)) for product in program.records.products]
    lengths = np.array([len(product.rows) for product in program.records.products], dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    owners = [product.owner + first for product, first in zip(program.records.products, before, strict=True)]
    owner = np.concatenate([np.zeros(0, dtype=np.int64), *owners])
    behind = 1 + _ranks(owner)  # z
    return Products(
        rows,
        floors,
        z,
        np.repeat([product.most for product in program.records.products], lengths),
        np.repeat(np.array(kind, dtype=np.int64), lengths),
        [dict(times) for times in kinds],
        ones,
        owner,
        starts[rows[owner]] + behind,
        starts[floors[owner]] + behind,
    )


def spread(times: Mapping[int, float], bounds: Mapping[int, tuple[float, float]]) -> tuple[float, float] | None:
    """The least and the largest value of a sum of counts; None if `bounds` lacks one of them."""
    if not all(v in bounds for v in times):
        return None
    ends = [sorted(c * end for end in bounds[v]) for v, c in times.items()]
    return sum(low for low, _ in ends), sum(high for _, high in ends)
