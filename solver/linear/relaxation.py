"""A linear relaxation solved by HiGHS with column generation (Gilmore and Gomory 1961).

The relaxation is first solved with only the cheapest flows as columns. Its dual values give the reduced costs of the
flows that are left out, and the best of those with a negative reduced cost enter. This ends when none is left (the
optimum is then that of all columns), or when the missing part is small, which is subtracted to get a bound. A flow that
needs other columns beside it first shares its cost with them: the rows that couple them are redundant while the flow
is 0, so their dual values may be chosen (`solver.linear.pricing`).

With other bounds of the counts, the relaxation is solved again from the basis of an earlier answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.highs import CUTOFF_REACHED, ITERATION_LIMIT, Basis, HighsSession, Start
from autopar.solver.linear.matrix import Matrix
from autopar.solver.linear.pricing import bound_by, priced
from autopar.solver.linear.terms import Array

_FIRST_FLOWS = 4  # first columns: so many of the cheapest flows at each end of a use; fewer need more rounds
_FIRST_FLOWS_LARGE = 6  # the same in a large program, where another round takes longer than some useless columns
_LARGE_COLUMNS = 100_000  # a program with more columns is large
_ENTERING_FLOWS = 6  # at most so many flows enter at each end in a round: more enter in vain, fewer need more rounds
_PRICING_GAP = 1e-6  # relative; pricing ends if missing columns lower the optimum by no more, which is subtracted
_PRICING_TOLERANCE = 1e-9  # a reduced cost counts as negative below minus this part of the optimum


class Relaxation:
    """The columns of a program that HiGHS has (`inside`), and its last answer.

    `everything`: all columns from the start; `first`: flows to start with; `at_once`: a large program starts with more
    columns than it needs, so that mostly one round is enough (a later round, from the basis of fewer columns, may take
    longer than a cold start).
    """

    def __init__(
        self, matrix: Matrix, *, everything: bool = False, at_once: bool = False, first: Array | None = None
    ) -> None:
        self.matrix = matrix
        cheapest = _FIRST_FLOWS_LARGE if at_once and matrix.columns > _LARGE_COLUMNS else _FIRST_FLOWS
        if everything:
            self.inside = np.ones(matrix.columns, dtype=bool)
        elif first is not None:
            self.inside = matrix.with_dependents(matrix.cheapest(1) | first)
        else:
            self.inside = matrix.cheapest(cheapest)
        self.objective = math.inf
        self.values, self.reduced = np.zeros(self.matrix.columns), np.zeros(self.matrix.columns)
        self.duals = np.zeros(self.matrix.lines)
        self._missed = 0.0  # at most 0: what the missing columns may add to the objective
        self._session = HighsSession(self.matrix)

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
        """Solve within bounds of counts, from `basis` or from that of the last answer.

        Returns "optimal", "infeasible", "stopped" (out of time or iterations), or "closed" if the optimum is at least
        `cutoff`: then `objective` is a bound, and `values` mean nothing. After `entering` seconds no columns enter any
        more, and `objective` is a bound of the optimum. `patient`: HiGHS may take as many iterations as it needs.
        `close`: how far `objective` may be below the optimum (relative); infinity: the first answer is enough.
        """
        begun = cpu_seconds()
        self.matrix.bound(bounds)
        if basis is not None:
            self._session.start_from(basis)
            self.inside[basis[0]] = True
        start: Start = "unperturbed" if close == math.inf else "warm"
        while True:
            elapsed = cpu_seconds() - begun
            status = self._session.run(self.inside, time_limit - elapsed, patient=patient, cutoff=cutoff, start=start)
            start = "warm"
            if status == "Infeasible":
                if not self._mend():
                    return "infeasible"
            elif status in ("Optimal", CUTOFF_REACHED, ITERATION_LIMIT) and self._above(cutoff):
                return "closed"
            elif status == CUTOFF_REACHED:
                if not self._enter_above():
                    cutoff, start = math.inf, "warm"  # the dual values do not confirm what HiGHS says
            elif status != "Optimal":
                return "stopped"
            elif not self._enter(_PRICING_GAP if close is None else close):
                return "optimal"
            elif cpu_seconds() - begun > entering:
                self.objective += self._missed
                return "optimal"

    @property
    def basis(self) -> Basis | None:
        """The basis of the last optimum."""
        return self._session.basis

    def _enter(self, close: float) -> bool:
        """Read the answer, and let columns enter that would improve it; False if none would."""
        self.objective, self.values, self.duals = self._session.answer()
        tolerance = _PRICING_TOLERANCE * abs(self.objective)
        self.reduced, flows, excess = priced(self.matrix, self.matrix.cost, self.inside, self.duals, tolerance)
        lacking = ~self.inside
        if not flows.any():
            self.objective -= excess
            return False
        missed = float(self.matrix.least_by_use(np.where(lacking, self.reduced, 0.0)).sum()) - excess
        others = lacking & (self.reduced < -tolerance)
        others[self.matrix.flows[:, 0]] = False
        self._missed = missed + float((self.reduced[others] * self.matrix.upper[others]).sum())
        if -missed <= close * abs(self.objective) and not others.any():
            self.objective += missed
            return False
        self.inside = self.matrix.with_dependents(
            self.inside | self.matrix.least_of(self.reduced, _ENTERING_FLOWS, flows)
        )
        return True

    def _above(self, cutoff: float) -> bool:
        """Whether the dual values of the answer prove that no solution costs less than the cutoff."""
        if cutoff == math.inf:
            return False
        self.objective = bound_by(self.matrix, self.inside, self._session.answer()[2])
        return self.objective >= cutoff

    def _enter_above(self) -> bool:
        """Let columns enter that would lower an answer at which HiGHS stopped early; False if none would."""
        value, _, duals = self._session.answer()
        reduced, flows, _ = priced(self.matrix, self.matrix.cost, self.inside, duals, _PRICING_TOLERANCE * abs(value))
        self.inside = self.matrix.with_dependents(self.inside | self.matrix.least_of(reduced, _ENTERING_FLOWS, flows))
        return bool(flows.any())

    def _mend(self) -> bool:
        """Farkas pricing: let columns enter that refute HiGHS's proof of infeasibility; False if none does."""
        ray = self._session.ray()
        entering = np.ones_like(self.inside)
        if ray is not None:
            entering = priced(self.matrix, np.zeros(self.matrix.columns), self.inside, ray, _PRICING_TOLERANCE).entering
        before, self.inside = self.inside, self.matrix.with_dependents(self.inside | entering)
        return bool((self.inside != before).any())
