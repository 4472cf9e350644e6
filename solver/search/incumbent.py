"""The incumbent of branch and bound (the best integer solution so far), and how boxes are solved for better ones.

In large programs, a box is solved with only the variables that solutions up to a cost limit can use: a solution in
which a variable of reduced cost d is 1 costs at least L + d, where L is the box's relaxation. If the solution found
costs more than the limit, the box is solved again with a higher limit.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import INTEGRALITY, Bounds, Outcome
from autopar.solver.linear.pricing import least_more
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array
from autopar.solver.search.openings import Openings
from autopar.solver.search.shrunk import required_of, without_zeros
from autopar.solver.search.windows import NEIGHBOURHOOD_SHARE, improved

# With more variables a program is large: its parts' relaxations generate columns, and its boxes are solved with only
# the variables that reduced costs leave.
MAX_SMALL_PROGRAM = 20_000
# A box with more flows than this is cut before it is solved as an integer program:
_MAX_FLOWS_UNCUT, _MAX_FLOWS_UNCUT_SMALL = 15_000, 300  # in general; in a small program with counts
_MAX_FLOWS_UNCUT_BUCKETS = 8_000  # in a large program, if the relaxation opens a bucket in part
_MAX_VARIABLES_AT_ONCE = 6_000  # after many cuts, a box (or all that is left) of at most this size is solved at once
_FIRST_NODES = 100  # HiGHS nodes for a box before it is cut again; doubled each time, so that the search ends
_FAR_GAP = 1e-2  # relative; an incumbent further from the bound is worth a search for a better one
_FIRST_MARGIN = 1e-3  # relative to the box's relaxation; first limit for reduced costs: lower, fewer variables are left


class Incumbent:
    """The best integer solution so far (`best`), and the least bound of all boxes that are closed (`proven`).

    `limit`: the program has all solutions up to this cost, but perhaps not those above.
    """

    def __init__(
        self,
        program: Program,
        solver: str,
        gap: float,
        clock: Clock,
        best: Outcome | None = None,
        limit: float = math.inf,
    ) -> None:
        self.program, self.solver, self.gap, self.clock, self.limit = program, solver, gap, clock, limit
        self.best = best
        self.openings = Openings(program)
        self.is_large = len(program.names) > MAX_SMALL_PROGRAM
        self.proven = math.inf
        self._nodes = _FIRST_NODES
        self._was_improved = False

    def seconds_left(self) -> float:
        return self.clock.remaining(self.best is not None)

    def closed(self, bound: float) -> bool:
        """Whether a box with this bound cannot improve the incumbent by more than the gap."""
        return bound >= self.cutoff()

    def find_first(self, root: Outcome, counts: Bounds) -> None:
        """If there is no incumbent, look for one with these counts, using the columns that the relaxations have."""
        if self.best is None and self.seconds_left() > 0:
            outcome = self.program.integrate(self.solver, self._entered(root), self.seconds_left(), self.gap, counts)
            self.best = outcome if len(outcome.values) else None

    def is_large_box(self, node: Outcome) -> bool:
        """Whether a box of a large program is too large to be solved before others are looked at."""
        return self.is_large and len(self.usable_variables(node, self.first_limit(node))) > MAX_SMALL_PROGRAM

    def is_small_box(self, node: Outcome) -> bool:
        """Whether there is an incumbent and HiGHS is likely to close a box soon."""
        return self.best is not None and len(self.usable_variables(node, self.cutoff())) <= _MAX_VARIABLES_AT_ONCE

    def has_many(self, node: Outcome) -> bool:
        """Whether there is an incumbent and a box is too large for an integer program, so that cuts are faster.

        In a small program without counts, cuts do not help as much: its blocks decide for themselves but are equal, so
        the parts of a cut are hardly easier than the box.
        """
        if self.best is None or node.status != "optimal" or node.relaxation is None:
            return False
        if self.is_mixed(node):
            return True
        kept = self.usable_variables(node, self.cutoff())
        flows = int(np.isin(kept, self.program.matrix().flows[:, 0]).sum())
        if self.is_large and flows > _MAX_FLOWS_UNCUT_BUCKETS and self.openings.split(node) is not None:
            return True
        return flows > (_MAX_FLOWS_UNCUT if self.is_large or not self.program.has_counts else _MAX_FLOWS_UNCUT_SMALL)

    def is_mixed(self, node: Outcome) -> bool:
        """Whether the relaxation of a box is far below the incumbent, in a large program without counts.

        Such a relaxation mixes a choice whose collectives are hidden with a choice of the same op that has none. In one
        case HiGHS reached a gap of 13 % in a minute, while four cuts by the choices of that op closed it.
        """
        return self.is_large and not self.program.has_counts and self.is_far(node.objective)

    def round(self, node: Outcome) -> None:
        """Look for a good solution of a done box quickly: only with the choices of nonzero value in its relaxation."""
        matrix = self.program.matrix()
        matrix.bound(node.counts)
        required = required_of(self.program)
        kept = without_zeros(matrix, required | ~matrix.integer | (node.values > INTEGRALITY), required)
        kept = np.flatnonzero(matrix.with_dependents(kept))
        cutoff, seconds = self.cutoff(), self.seconds_left()
        self._take(self.program.integrate(self.solver, kept, seconds, self.gap, node.counts, cutoff=cutoff))

    def solve(self, node: Outcome, known_bound: float = -math.inf) -> bool:
        """Solve a done box as an integer program; the incumbent changes if the solution beats it by more than the gap.

        False if the first solution of all shows that cuts are faster: the box is still open then. `known_bound`: a
        bound of the box, used if it is higher than its relaxation.
        """
        known_bound, is_first = max(known_bound, node.objective), self.best is None
        if self._solved_by_itself(node):
            self.proven = min(self.proven, known_bound)
            return True
        margin = self.first_limit(node) - node.objective if self.is_large else math.inf
        mine = math.inf  # the best solution of this box
        while True:
            cutoff = self.cutoff()
            limit = min(node.objective + margin, cutoff)
            kept = self.usable_variables(node, limit)
            everything = len(kept) == int((self.program.matrix().upper > 0).sum())
            late = self.best is None and self.clock.elapsed > self.clock.limit
            gap = 1.0 if late else self.gap
            outcome = self.program.integrate(self.solver, kept, self.seconds_left(), gap, node.counts, cutoff=cutoff)
            if self.best is None or outcome.objective < self.best.objective:
                self.best = outcome if len(outcome.values) else None
            mine = min(mine, outcome.objective)
            if outcome.status == "stopped":
                if self.best is None:
                    continue
                self.proven = min(self.proven, known_bound)
                return True
            bound = max(known_bound, min(outcome.bound, cutoff if everything else limit))
            done = everything or limit >= cutoff or (self.best is not None and self.closed(bound))
            if done or mine <= limit or outcome.status == "feasible" or (self.best and self.seconds_left() <= 0):
                self.proven = min(self.proven, bound)
                return True
            if is_first and self.is_mixed(node):
                return False
            margin = min(8 * margin, (mine - node.objective) * (1 + 1e-9) + 1e-9)  # mine is inf without a solution

    def partial_solve(self, node: Outcome, part: float = 1.0, nodes: int | None = None) -> float:
        """The bound that HiGHS proves of a box in some nodes; a better solution that it finds becomes the incumbent.

        Each call doubles the nodes of the next, so that the search ends even if cuts do not make boxes easier. `part`:
        share of the remaining time that HiGHS may take; `nodes`: a fixed number of nodes instead.
        """
        cutoff, kept, seconds = self.cutoff(), self.usable_variables(node, self.cutoff()), part * self.seconds_left()
        outcome = self.program.integrate(
            self.solver, kept, seconds, self.gap, node.counts, cutoff=cutoff, nodes=nodes or self._nodes
        )
        self._nodes *= 1 if nodes else 2
        self._take(outcome)
        return max(node.objective, min(outcome.bound, cutoff))

    def closes(self, root: Outcome, part: float, nodes: int | None = None) -> bool:
        """Whether HiGHS closes a box within a share of the remaining time and so many nodes."""
        bound = self.partial_solve(root, part, nodes)
        if self.closed(bound):
            self.proven = min(self.proven, bound)
            return True
        return False

    def is_far(self, bound: float) -> bool:
        """Whether the incumbent is so far above a bound that improving it is worth more than raising the bound."""
        return self.best is not None and self.best.objective - bound > _FAR_GAP * abs(self.best.objective)

    def improve(self, bound: float) -> None:
        """Once, for a share of the time, search near the incumbent if `bound` leaves room for a better one."""
        if self.best is not None and not self._was_improved and not self.closed(bound):
            self._was_improved = True
            self.best = improved(self.program, self.solver, self.gap, self.best, NEIGHBOURHOOD_SHARE * self.clock.limit)

    def _take(self, outcome: Outcome) -> None:
        if len(outcome.values) and (self.best is None or outcome.objective < self.best.objective):
            self.best = outcome

    def first_limit(self, node: Outcome) -> float:
        """The first cost limit of a box: solutions up to this cost are looked for first."""
        return node.objective + max(abs(node.objective) * max(self.gap, _FIRST_MARGIN), 1e-6)

    def cutoff(self) -> float:
        """The bound at which a box is closed: infinite without an incumbent, else at most the program's limit."""
        return math.inf if self.best is None else min(self.limit, self.proof_bound())

    def proof_bound(self) -> float:
        """The bound that proves the incumbent optimal within the gap."""
        assert self.best is not None
        return self.best.objective - self.gap * abs(self.best.objective)

    def _solved_by_itself(self, node: Outcome) -> bool:
        """Take an integral relaxation as the best solution of its box; whether the box is closed then."""
        solution = self.program.as_whole(node)
        if solution is None or any(not low <= round(node.values[v]) <= high for v, (low, high) in node.counts.items()):
            return False
        self.best = solution if self.best is None else min(self.best, solution, key=lambda outcome: outcome.objective)
        return self.closed(node.objective)

    def usable_variables(self, node: Outcome, limit: float) -> Array:
        """The variables that a solution of this box can use if it costs at most `limit` (reduced-cost fixing)."""
        matrix = self.program.matrix()
        matrix.bound(node.counts)
        extra_cost = least_more(matrix, node.reduced)
        return np.flatnonzero((required_of(self.program) | (node.objective + extra_cost <= limit)) & (matrix.upper > 0))

    def _entered(self, node: Outcome) -> Array:
        """The columns that have entered the relaxation by column generation; all columns if it was solved whole."""
        if node.relaxation is None:
            return np.arange(len(self.program.names))
        return np.flatnonzero(node.relaxation.inside)
