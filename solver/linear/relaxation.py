"""A linear relaxation solved by HiGHS with few of its columns: the others enter where they would help.

Column generation (Gilmore and Gomory 1961). The relaxation is solved with the cheapest flows alone; its dual values
price the flows that are left out; the best of those whose reduced cost is negative enter, until nothing worth it is
left: then the optimum is that of all columns, or a bound just below it. A flow that takes others along shares its price
with them first: rows that say nothing where the flow is 0 have dual values of one's own choice.

It is solved again, with other bounds of the counts, from the basis of a time before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.highs import ENOUGH, LIMIT, Basis, HighsSession, Start
from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.pricing import bound_by, priced
from autopar.solver.linear.terms import Array

_CHEAPEST = 4  # of the flows that leave or enter at an end, those that are there at first
_OF_LARGE = 6  # and of a program with more columns than these, where another round takes longer than columns in vain
_LARGE = 100_000
_BEST = 6  # and of those that would help, those that enter at a time
_CLOSE = 1e-6  # what may be missed of the optimum, relatively, is taken off
_TOLERANCE = 1e-9  # of reduced costs, relative to the optimum


class Relaxation:
    """What HiGHS holds of a program, and its answer to the last question.

    `everything`: with all columns from the start; `first`: with these flows; `at_once`: in a large program with more of
    them than are needed, so that one round is mostly enough (from the basis of fewer a round may take longer than from
    nothing).
    """

    def __init__(
        self, matrix: Matrix, *, everything: bool = False, at_once: bool = False, first: Array | None = None
    ) -> None:
        self.matrix = matrix
        cheapest = _OF_LARGE if at_once and matrix.columns > _LARGE else _CHEAPEST
        if everything:
            self.inside = np.ones(matrix.columns, dtype=bool)
        elif first is not None:
            self.inside = matrix.with_company(matrix.cheapest(1) | first)
        else:
            self.inside = matrix.cheapest(cheapest)
        self.objective = math.inf
        self.values, self.reduced = np.zeros(self.matrix.columns), np.zeros(self.matrix.columns)
        self.duals = np.zeros(self.matrix.lines)
        self._missed = 0.0  # what columns that it lacked could take off it, at most
        self._held = HighsSession(self.matrix)

    def solve(
        self,
        bounds: Mapping[int, tuple[float, float]],
        time_limit: float,
        entering: float,
        *,
        basis: Basis | None = None,
        patient: bool = False,
        close: float | None = None,
        cutoff: float = math.inf,
    ) -> str:
        """Solve within bounds of counts, from a basis or that of the last time; "optimal", "infeasible" or "stopped".

        "closed" where the optimum was found to be at least `cutoff`: `objective` is a bound of it then, `values` mean
        nothing. After so many seconds of `entering` no more columns enter, and `objective` is a bound of the optimum.
        `patient`: HiGHS may take as many iterations as it wants. `close`: what `objective` may miss, relatively;
        infinity: the first answer is enough.
        """
        begun = cpu_seconds()
        self.matrix.bound(bounds)
        if basis is not None:
            self._held.stand(basis)
            self.inside[basis[0]] = True
        start: Start = "plain" if close == math.inf else "basis"
        while True:
            gone = cpu_seconds() - begun
            status = self._held.run(self.inside, time_limit - gone, patient=patient, cutoff=cutoff, start=start)
            start = "basis"
            if status == "Infeasible":
                if not self._mend():
                    return "infeasible"
            elif status in ("Optimal", ENOUGH, LIMIT) and self._above(cutoff):
                return "closed"
            elif status == ENOUGH:
                if not self._enter_above():
                    cutoff, start = math.inf, "basis"  # HiGHS says so, and its dual values do not
            elif status != "Optimal":
                return "stopped"
            elif not self._enter(_CLOSE if close is None else close):
                return "optimal"
            elif cpu_seconds() - begun > entering:
                self.objective += self._missed
                return "optimal"

    @property
    def basis(self) -> Basis | None:
        """The basis of the last answer."""
        return self._held.basis

    def _enter(self, close: float) -> bool:
        """Read the answer, and let in what would improve it; False where nothing would."""
        self.objective, self.values, self.duals = self._held.answer()
        tolerance = _TOLERANCE * abs(self.objective)
        self.reduced, flows, loose = priced(self.matrix, self.matrix.cost, self.inside, self.duals, tolerance)
        lacking = ~self.inside
        if not flows.any():
            self.objective -= loose
            return False
        missed = float(self.matrix.least_by_use(np.where(lacking, self.reduced, 0.0)).sum()) - loose
        others = lacking & (self.reduced < -tolerance)
        others[self.matrix.flows[:, 0]] = False
        self._missed = missed + float((self.reduced[others] * self.matrix.upper[others]).sum())
        if -missed <= close * abs(self.objective) and not others.any():
            self.objective += missed
            return False
        self.inside = self.matrix.with_company(self.inside | self.matrix.least_of(self.reduced, _BEST, flows))
        return True

    def _above(self, cutoff: float) -> bool:
        """Whether the dual values of the answer prove that nothing costs less than the cutoff."""
        if cutoff == math.inf:
            return False
        self.objective = bound_by(self.matrix, self.inside, self._held.answer()[2])
        return self.objective >= cutoff

    def _enter_above(self) -> bool:
        """Let in what would lower an answer that HiGHS did not come to the end of; False where nothing would."""
        value, _, duals = self._held.answer()
        reduced, flows, _ = priced(self.matrix, self.matrix.cost, self.inside, duals, _TOLERANCE * abs(value))
        self.inside = self.matrix.with_company(self.inside | self.matrix.least_of(reduced, _BEST, flows))
        return bool(flows.any())

    def _mend(self) -> bool:
        """Let in what speaks against a proof that there is no solution (Farkas); False where nothing does."""
        ray = self._held.ray()
        more = np.ones_like(self.inside)
        if ray is not None:
            _, more, _ = priced(self.matrix, np.zeros(self.matrix.columns), self.inside, ray, _TOLERANCE)
        known, self.inside = self.inside, self.matrix.with_company(self.inside | more)
        return bool((self.inside != known).any())
