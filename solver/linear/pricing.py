"""Pricing: reduced costs of the columns that a relaxation was solved without.

The solver gives dual values of the rows that it had. The other rows are redundant while the columns left out are 0, so
any dual values of the right sign are valid for them; they are chosen here such that as many reduced costs as possible
are nonnegative. Such a row lets one column pass a negative reduced cost on to another: a count of replays to the
variable that pays for the largest of several counts, and to the flows that it counts; a flow to the conversion that it
shares with other flows, and this conversion to the one that all readers share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.terms import Array

_DUAL_TOLERANCE = 1e-7  # HiGHS's tolerance of reduced costs (dual feasibility)


class Pricing(NamedTuple):
    """Reduced costs, and what follows from them."""

    reduced: Array  # of all columns
    entering: Array  # whether each column is a flow that should enter
    excess: float  # by how much a bound is too high


def priced(matrix: Matrix, cost: Array, inside: Array, duals: Array, tolerance: float) -> Pricing:
    """Reduced costs of all columns, and the flows outside `inside` that should enter.

    If no flow should enter, only columns at their upper bound have a reduced cost below -`tolerance`. `duals` are 0 for
    rows that the program of the columns inside does not have. A missing row with more than two columns may be slack
    while its child is 0, so a dual value of it is not valid: the flows that used such a value should enter, and the sum
    of these values is the `excess`.
    """
    prices = _prices(matrix, cost, inside, duals)
    reduced = prices.reduced
    enters = ~inside & (reduced < -tolerance)
    implications = matrix.implications
    loose = ~implications.is_bare & (prices.raised > tolerance)
    enters[implications.child[loose]] = True
    through = enters[implications.parent] & (prices.raised > 0)  # parents that could not pass on all they were given
    enters[implications.child[through]] = True
    counted = matrix.products
    enters[counted.ones[enters[counted.z][counted.owner]]] = True
    entering = np.zeros(matrix.columns, dtype=bool)
    entering[matrix.flows[:, 0]] = enters[matrix.flows[:, 0]]
    excess = float(prices.raised[~implications.is_bare].sum())
    return Pricing(reduced + _dependent_costs(matrix, reduced), entering & ~inside, excess)


def bound_by(matrix: Matrix, inside: Array, duals: Array) -> float:
    """The Lagrangian bound of a program, from any dual values of the rows that the columns inside need.

    The values given by missing rows with more than two columns are subtracted; the flows of a use sum up to one.
    """
    duals = np.where(np.isinf(np.where(duals > 0, matrix.least, matrix.most)), 0.0, duals)
    prices = _prices(matrix, matrix.cost, inside, duals)
    free = np.isinf(np.where(prices.reduced > 0, matrix.lower, matrix.upper))
    worth = np.where(free & (np.abs(prices.reduced) <= _DUAL_TOLERANCE), 0.0, prices.reduced)
    bound = float(np.where(duals > 0, matrix.least, matrix.most)[duals != 0] @ duals[duals != 0])
    bound -= float(prices.raised[~matrix.implications.is_bare].sum())
    flows = np.zeros(matrix.columns, dtype=bool)
    flows[matrix.flows[:, 0]] = ~inside[matrix.flows[:, 0]]
    bounded = ~flows & (worth != 0)
    bound += float(worth[bounded] @ np.where(worth > 0, matrix.lower, matrix.upper)[bounded])
    return bound + float(matrix.least_by_use(np.where(flows, worth, 0.0)).sum())


def _prices(matrix: Matrix, cost: Array, inside: Array, duals: Array) -> _Prices:
    """Reduced costs of all columns, with dual values chosen for the missing rows."""
    prices = _Prices(
        matrix, inside, cost - np.bincount(matrix.column, duals[matrix.row] * matrix.value, minlength=matrix.columns)
    )
    prices.counts()
    prices.flows()
    return prices


def _dependent_costs(matrix: Matrix, reduced: Array) -> Array:
    """By column, the positive reduced costs of the columns that it implies, which are used along with it."""
    implications, costs = matrix.implications, np.zeros(matrix.columns)
    bare = implications.is_bare & ~implications.child_is_parent
    np.add.at(costs, implications.child[bare], np.maximum(0.0, reduced[implications.parent[bare]]))
    return costs


def least_more(matrix: Matrix, reduced: Array) -> Array:
    """By column, how much a solution that uses it costs at least above the relaxation's optimum.

    These figures are at least the reduced costs. A choice needs a flow at each of its ends, so the least reduced cost
    of an end's flows is passed on to the choices there: this is another dual value of the end's row, whose right side
    is 0. A flow needs a choice at either end, so it also costs what these do. What a flow pays for the columns that it
    implies is not passed on: another flow of the same choice may imply the same columns, which would then count twice.
    """
    dependent_costs = _dependent_costs(matrix, reduced)
    costs, flows = reduced - dependent_costs, matrix.flows[:, 0]
    rows, choices = matrix.end_rows, matrix.end_choices
    certain = np.zeros(matrix.lines, dtype=bool)  # ends whose choice is made in every solution
    certain[rows[matrix.lower[choices] > 0]] = True
    for ends in matrix.flows[:, 1:].T:
        least = np.full(matrix.lines, np.inf)
        np.minimum.at(least, ends, np.maximum(costs[flows], 0.0))
        least[certain | np.isinf(least)] = 0.0
        costs[flows] -= least[ends]
        np.add.at(costs, choices, least[rows])
    least = np.full(matrix.lines, np.inf)
    np.minimum.at(least, rows, np.maximum(costs[choices], 0.0))
    least[certain] = 0.0
    costs[flows] += least[matrix.flows[:, 1]] + least[matrix.flows[:, 2]]
    return costs + dependent_costs


class _Prices:
    """The dual values chosen for missing rows, as changes of `reduced`; `raised`: those of the implications."""

    def __init__(self, matrix: Matrix, inside: Array, reduced: Array) -> None:
        self.matrix, self.left_out, self.reduced = matrix, ~inside, reduced
        self.raised = np.zeros(len(matrix.implications.rows))
        self._of_counts = np.zeros(matrix.columns, dtype=bool)
        self._of_counts[matrix.products.z] = True

    def counts(self) -> None:
        """Negative reduced costs of counts: taken from the variable of the largest count first, then from the flows."""
        products = self.matrix.products
        self._share(self._asleep(of_counts=True), limited=True)
        lacking = np.where(self.left_out[products.z], np.maximum(0.0, -self.reduced[products.z]), 0.0)
        self.reduced[products.z] += lacking
        np.add.at(self.reduced, products.ones, self.matrix.value[products.entries] * lacking[products.owner])
        paid = np.where(
            self.left_out[products.z] & (self.matrix.slopes > 0), np.maximum(0.0, self.reduced[products.z]), 0.0
        )
        self.reduced[products.z] -= paid
        np.add.at(self.reduced, products.ones, (self.matrix.slopes * paid)[products.owner])

    def flows(self) -> None:
        """Negative reduced costs of flows: taken from their conversions, and of these from those all readers share."""
        implications, rows = self.matrix.implications, self._asleep(of_counts=False)
        above = rows[implications.child_is_parent[rows]]
        below = rows[~implications.child_is_parent[rows]]
        passes = self.left_out[implications.parent[below]] & np.isin(
            implications.parent[below], implications.child[above]
        )
        self._share(below[passes], limited=False)
        self._share(below[~passes], limited=True)
        self._share(above, limited=True)

    def _asleep(self, *, of_counts: bool) -> Array:
        """The implications whose rows are missing, of counts or of flows."""
        implications = self.matrix.implications
        return np.flatnonzero(self.left_out[implications.child] & (self._of_counts[implications.child] == of_counts))

    def _share(self, rows: Array, *, limited: bool) -> None:
        """Raise negative reduced costs of children at their parents' expense; `limited`: these stay nonnegative."""
        implications, reduced = self.matrix.implications, self.reduced
        batches = implications.batch[rows]
        for batch in np.unique(batches):
            current = rows[batches == batch]
            child, parent = implications.child[current], implications.parent[current]
            amount = np.maximum(0.0, -reduced[child])
            if limited:
                amount = np.minimum(amount, np.maximum(0.0, reduced[parent]))
            reduced[child] += amount
            reduced[parent] -= amount
            self.raised[current] = amount
