"""A linear relaxation solved by HiGHS with few of its columns: the others enter where they would help.

Column generation (Gilmore and Gomory 1961). The relaxation is solved with the cheapest flows alone; its dual values
price the flows that are left out; those whose reduced cost is negative enter, until there is none: then the optimum is
that of all columns. A flow that takes others along shares its price with them first: rows that say nothing where the
flow is 0 have dual values of one's own choice.

It is solved again, with other bounds of the counts, from the basis of the last time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import numpy as np

from autopar.solver.held import Held
from autopar.solver.matrix import Matrix
from autopar.solver.pricing import priced

_CHEAPEST = 4  # of the flows that leave or enter at an end, those that are there at first
_TOLERANCE = 1e-9  # of reduced costs, relative to the optimum


class Relaxation:
    """What HiGHS holds of a program, and its answer to the last question."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self.inside = self.matrix.cheapest(_CHEAPEST)
        self.objective = math.inf
        self.values, self.reduced = np.zeros(self.matrix.columns), np.zeros(self.matrix.columns)
        self._lacking = ~self.inside  # at the last answer
        self._held = Held(self.matrix)

    def solve(
        self, bounds: Mapping[int, tuple[float, float]], time_limit: float, entering: float, *, patient: bool = False
    ) -> str:
        """Solve within bounds of counts; "optimal", "infeasible" or "stopped".

        After so many seconds of `entering` no more columns enter, and `objective` is a bound of the optimum.
        `patient`: HiGHS may take as many iterations as it wants.
        """
        begun = time.perf_counter()
        self.matrix.bound(bounds)
        while True:
            gone = time.perf_counter() - begun
            status = self._held.run(self.inside, time_limit - gone, patient=patient)
            if status == "Infeasible":
                if not self._mend():
                    return "infeasible"
            elif status != "Optimal":
                return "stopped"
            elif not self._enter():
                return "optimal"
            elif time.perf_counter() - begun > entering:
                self.objective += float(np.minimum(0.0, self.reduced[self._lacking]).sum())
                return "optimal"

    def _enter(self) -> bool:
        """Read the answer, and let in what would improve it; False where nothing would."""
        self.objective, self.values, duals = self._held.answer()
        tolerance = _TOLERANCE * abs(self.objective)
        self.reduced, flows = priced(self.matrix, self.matrix.cost, self.inside, duals, tolerance)
        self._lacking = ~self.inside
        self.inside = self.matrix.with_company(self.inside | flows)
        return bool(flows.any())

    def _mend(self) -> bool:
        """Let in what speaks against a proof that there is no solution (Farkas); False where nothing does."""
        ray = self._held.ray()
        more = np.ones_like(self.inside)
        if ray is not None:
            _, more = priced(self.matrix, np.zeros(self.matrix.columns), self.inside, ray, _TOLERANCE)
        known, self.inside = self.inside, self.matrix.with_company(self.inside | more)
        return bool((self.inside != known).any())
