"""Reduced costs of columns that a relaxation was solved without.

For the rows that it had, the solver gives dual values. The others say nothing while the columns left out are 0; their
dual values are chosen here so that as many reduced costs as possible are not negative. Each such row lets one column
hand what it lacks to another: a count of replays to what pays for the largest of several counts, and to the flows that
it counts; a flow to the conversion that it shares with others, and this to the one that all readers share.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.terms import Array

_EXACT = 1e-7  # HiGHS's tolerance of reduced costs


def priced(matrix: Matrix, cost: Array, inside: Array, duals: Array, tolerance: float) -> tuple[Array, Array, float]:
    """Reduced costs of all columns, which flows that are not `inside` would help, and what may be proven too much.

    Where none would, none of the reduced costs is below -`tolerance` but of columns at their upper bound. `duals` are
    of the rows that a program of the columns inside has; for the others they are 0. A row that is not there and holds
    more than two columns may be slack where its small is 0, so that no dual value is due to it: what it gave is the
    third answer, and its flows help.
    """
    prices = _prices(matrix, cost, inside, duals)
    reduced = prices.reduced
    wanted = ~inside & (reduced < -tolerance)
    some = matrix.implications
    loose = ~some.alone & (prices.given > tolerance)
    wanted[some.small[loose]] = True
    through = wanted[some.big] & (prices.given > 0)  # what gave more than could be passed on
    wanted[some.small[through]] = True
    counted = matrix.products
    wanted[counted.ones[wanted[counted.z][counted.owner]]] = True
    helps = np.zeros(matrix.columns, dtype=bool)
    helps[matrix.flows[:, 0]] = wanted[matrix.flows[:, 0]]
    return reduced + _of_company(matrix, reduced), helps & ~inside, float(prices.given[~some.alone].sum())


def bound_by(matrix: Matrix, inside: Array, duals: Array) -> float:
    """What a program costs at least, by any dual values of the rows that one of the columns inside has (Lagrange).

    Rows that are not there and hold more than two columns are taken at their worst; flows of a use are shares of one.
    """
    duals = np.where(np.isinf(np.where(duals > 0, matrix.least, matrix.most)), 0.0, duals)
    prices = _prices(matrix, matrix.cost, inside, duals)
    free = np.isinf(np.where(prices.reduced > 0, matrix.lower, matrix.upper))
    worth = np.where(free & (np.abs(prices.reduced) <= _EXACT), 0.0, prices.reduced)
    found = float(np.where(duals > 0, matrix.least, matrix.most)[duals != 0] @ duals[duals != 0])
    found -= float(prices.given[~matrix.implications.alone].sum())
    flows = np.zeros(matrix.columns, dtype=bool)
    flows[matrix.flows[:, 0]] = ~inside[matrix.flows[:, 0]]
    some = ~flows & (worth != 0)
    found += float(worth[some] @ np.where(worth > 0, matrix.lower, matrix.upper)[some])
    return found + float(matrix.least_by_use(np.where(flows, worth, 0.0)).sum())


def _prices(matrix: Matrix, cost: Array, inside: Array, duals: Array) -> _Prices:
    """Reduced costs of all columns, with dual values for the rows that are not there."""
    found = _Prices(
        matrix, inside, cost - np.bincount(matrix.column, duals[matrix.row] * matrix.value, minlength=matrix.columns)
    )
    found.counts()
    found.flows()
    return found


def _of_company(matrix: Matrix, reduced: Array) -> Array:
    """What columns pay besides, since what they imply is used with them; by its own reduced costs, which stay."""
    some, found = matrix.implications, np.zeros(matrix.columns)
    alone = some.alone & ~some.upper
    np.add.at(found, some.small[alone], np.maximum(0.0, reduced[some.big[alone]]))
    return found


def least_more(matrix: Matrix, reduced: Array) -> Array:
    """What a solution costs at least beyond the optimum of a relaxation, with these reduced costs, if it uses a column.

    A flow cannot be used without a choice at either end, and costs with these; a choice cannot be made without a flow
    at each of its ends, so that what all flows of an end cost is handed to the choices there: that is another dual
    value of the end's row, whose right side is 0. What a flow pays for its company (`priced`) is not handed on: another
    flow of the same choice may have the same company, and its price would count twice.
    """
    company = _of_company(matrix, reduced)
    found, flows = reduced - company, matrix.flows[:, 0]
    rows, choices = matrix.end_rows, matrix.end_choices
    made = np.zeros(matrix.lines, dtype=bool)  # ends whose choice is made in every solution
    made[rows[matrix.lower[choices] > 0]] = True
    for ends in matrix.flows[:, 1:].T:
        least = np.full(matrix.lines, np.inf)
        np.minimum.at(least, ends, np.maximum(found[flows], 0.0))
        least[made | np.isinf(least)] = 0.0
        found[flows] -= least[ends]
        np.add.at(found, choices, least[rows])
    least = np.full(matrix.lines, np.inf)
    np.minimum.at(least, rows, np.maximum(found[choices], 0.0))
    least[made] = 0.0
    found[flows] += least[matrix.flows[:, 1]] + least[matrix.flows[:, 2]]
    return found + company


class _Prices:
    """Dual values of rows that are not there, as changes of `reduced`; `given`: of the implications."""

    def __init__(self, matrix: Matrix, inside: Array, reduced: Array) -> None:
        self.matrix, self.left, self.reduced = matrix, ~inside, reduced
        self.given = np.zeros(len(matrix.implications.rows))
        self._of_counts = np.zeros(matrix.columns, dtype=bool)
        self._of_counts[matrix.products.z] = True

    def counts(self) -> None:
        """What counts lack: first from the largest of them, the rest from their flows."""
        products = self.matrix.products
        self._share(self._asleep(of_counts=True), limited=True)
        lacking = np.where(self.left[products.z], np.maximum(0.0, -self.reduced[products.z]), 0.0)
        self.reduced[products.z] += lacking
        np.add.at(self.reduced, products.ones, self.matrix.value[products.entries] * lacking[products.owner])
        paid = np.where(
            self.left[products.z] & (self.matrix.slopes > 0), np.maximum(0.0, self.reduced[products.z]), 0.0
        )
        self.reduced[products.z] -= paid
        np.add.at(self.reduced, products.ones, (self.matrix.slopes * paid)[products.owner])

    def flows(self) -> None:
        """What flows lack: from their conversions, and these from those that all readers share."""
        some, rows = self.matrix.implications, self._asleep(of_counts=False)
        above = rows[some.upper[rows]]
        below = rows[~some.upper[rows]]
        passes = self.left[some.big[below]] & np.isin(some.big[below], some.small[above])
        self._share(below[passes], limited=False)
        self._share(below[~passes], limited=True)
        self._share(above, limited=True)

    def _asleep(self, *, of_counts: bool) -> Array:
        """The implications that are not there, of counts or of flows."""
        some = self.matrix.implications
        return np.flatnonzero(self.left[some.small] & (self._of_counts[some.small] == of_counts))

    def _share(self, rows: Array, *, limited: bool) -> None:
        """What the smalls lack is taken from the bigs, no more than these have if `limited`."""
        some, reduced = self.matrix.implications, self.reduced
        ranks = some.rank[rows]
        for rank in np.unique(ranks):
            now = rows[ranks == rank]
            small, big = some.small[now], some.big[now]
            amount = np.maximum(0.0, -reduced[small])
            if limited:
                amount = np.minimum(amount, np.maximum(0.0, reduced[big]))
            reduced[small] += amount
            reduced[big] -= amount
            self.given[now] = amount
