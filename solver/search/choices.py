"""Branching on the choices of an op: which op's choices the relaxation mixes most, and where to cut them in two.

Exactly one choice of an op is made: they sum to 1. If a budget binds, a relaxation mixes choices that cost little with
others that need little memory. The worth w of a choice s is the sum of its matrix entries times the dual values y of
their rows. The more the mixed choices of an op differ in worth, the more a cut between them raises the bound::

    w[s] = sum_i a[i,s] y[i]      over all rows i but those of the choices' sum and of the flows that start or end there
    mix  = sum_s x[s] |w[s] - sum_s x[s] w[s]|

Without a budget, a relaxation mixes choices whose collectives take longer than the compute that hides them with others
that have none. Then the worth W of a choice also has the mean worth of its flows f at each of its ends e, weighted by
the values that the relaxation gives the flows::

    W[s] = w[s] + sum_e (sum_f f[s,e] w[f] / sum_f f[s,e])

The choices of the op are sorted by worth and cut where half of the op's weight lies on either side (special ordered
set, Beale and Tomlin 1970), so that equivalent choices, such as the same split over one axis or another, stay together.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.outcome import INTEGRALITY, Bounds, Outcome
from autopar.solver.linear.terms import Array

_WORTH_TOLERANCE = 1e-9  # choices are equally good if their worth differs by less than this part of the largest worth


class Choices:
    """The groups of 0/1 variables of a program of which exactly one is 1; `with_flows`: worth W instead of w."""

    def __init__(self, matrix: Matrix, *, with_flows: bool = False) -> None:
        self.matrix, self.with_flows = matrix, with_flows
        sums_to_one = (matrix.least == 1) & (matrix.most == 1)
        of_choices = sums_to_one.copy()
        of_choices[matrix.row[sums_to_one[matrix.row] & (~matrix.integer[matrix.column] | (matrix.value != 1))]] = False
        at = np.flatnonzero(of_choices[matrix.row])
        rows, self.owner = np.unique(matrix.row[at], return_inverse=True)
        self.columns, self.groups = matrix.column[at], len(rows)
        self._priced = np.ones(matrix.lines, dtype=bool)
        self._priced[rows] = False
        self._priced[matrix.flows[:, 1:]] = False

    def split(self, node: Outcome) -> tuple[Bounds, Bounds] | None:
        """The two parts of a relaxation's box, the likelier one first; None if no choice is fractional."""
        values = node.values[self.columns]
        mixed = (values > INTEGRALITY) & (values < 1 - INTEGRALITY)
        if not mixed.any():
            return None
        worth = self._worth(node)[self.columns]
        mean = np.bincount(self.owner, values * worth, minlength=self.groups)
        mix = np.bincount(self.owner, values * np.abs(worth - mean[self.owner]), minlength=self.groups)
        half = np.bincount(self.owner, np.minimum(values, 1 - values), minlength=self.groups)
        mix = mix + _WORTH_TOLERANCE * half  # decides if all choices are worth the same
        mix[np.setdiff1d(np.arange(self.groups), self.owner[mixed])] = -1.0
        columns = np.flatnonzero(self.owner == int(mix.argmax()))
        columns = columns[np.argsort(worth[columns], kind="stable")]
        at = self._cut(worth[columns], values[columns])
        parts = columns[:at], columns[at:]
        likely, other = parts if values[parts[0]].sum() > values[parts[1]].sum() else parts[::-1]
        return self._without(node, other), self._without(node, likely)

    def _cut(self, worth: Array, values: Array) -> int:
        """The index of the choice, in order of worth, at which the second half begins."""
        below = np.cumsum(values)[:-1]
        apart = (below > INTEGRALITY) & (below < values.sum() - INTEGRALITY)
        unlike = apart & (np.diff(worth) > _WORTH_TOLERANCE * np.abs(worth).max())
        places = np.flatnonzero(unlike if unlike.any() else apart)
        return int(places[np.abs(below[places] - 0.5).argmin()]) + 1

    def _worth(self, node: Outcome) -> Array:
        matrix = self.matrix
        if not len(node.duals):  # CBC gives no dual values
            return np.zeros(matrix.columns)
        priced = np.where(self._priced, node.duals, 0.0)
        worth: Array = np.bincount(matrix.column, priced[matrix.row] * matrix.value, minlength=matrix.columns)
        return worth + self._of_flows(worth, node.values) if self.with_flows else worth

    def _of_flows(self, worth: Array, values: Array) -> Array:
        """The mean worth of each choice's flows, summed over its ends."""
        matrix, (flows, *ends) = self.matrix, self.matrix.flows.T
        weight, weighted = np.zeros(matrix.lines), np.zeros(matrix.lines)
        for rows in ends:
            np.add.at(weight, rows, values[flows])
            np.add.at(weighted, rows, values[flows] * worth[flows])
        mean = np.divide(weighted, weight, out=np.zeros(matrix.lines), where=weight > INTEGRALITY)
        return np.bincount(matrix.end_choices, mean[matrix.end_rows], minlength=matrix.columns)

    def _without(self, node: Outcome, excluded: Array) -> Bounds:
        return {**node.counts, **dict.fromkeys(self.columns[excluded].tolist(), (0.0, 0.0))}
