"""The incumbent of branch and bound, the best integer solution known of a program, and looking for better ones.

Boxes of programs that are not small are solved with the variables alone that solutions up to a limit can use: one of
reduced cost d that is 1 costs at least L + d, where L is the box's relaxation. What is found is compared with the
limit, and with a higher one it is done again if it has to be.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import WHOLE, Bounds, Outcome
from autopar.solver.linear.pricing import least_more
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array
from autopar.solver.search.openings import Openings
from autopar.solver.search.shrunk import held_of, without_zeros
from autopar.solver.search.windows import SHARE, improved

FEW = 20_000  # variables with which a relaxation and whole numbers are solved at once
_FLOWS, _FEW_FLOWS = 15_000, 300  # with which whole numbers are solved at once; few: of a small program with counts
_FEW_TO_OPEN = 8_000  # with which they are solved at once where a bucket is there in part: cuts by these are faster
_FEW_KEPT = 6_000  # variables with which a box of a small program, or all that is left of it, is solved at once
_NODES = 100  # of HiGHS's search, after which a box that it has not closed is cut, at first
_FAR = 1e-2  # of its cost: how much better than a far solution others may be
_MARGIN = 1e-3  # the first margin of reduced costs, relative


class Incumbent:
    """The best integer solution so far (`best`), and the least bound of boxes that are done with (`proven`)."""

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
        self.slow = len(program.names) > FEW
        self.proven = math.inf
        self._nodes = _NODES
        self._was_improved = False

    def left(self) -> float:
        return self.clock.left(self.best is not None)

    def closed(self, bound: float) -> bool:
        """Whether nothing in a box with this bound could be better by more than the gap."""
        return bound >= self.enough()

    def first(self, root: Outcome, counts: Bounds) -> None:
        """A first solution with these counts, where there is none: with what relaxations have made use of."""
        if self.best is None and self.left() > 0:
            found = self.program.integrate(self.solver, self._entered(root), self.left(), self.gap, counts)
            self.best = found if len(found.values) else None

    def is_large(self, node: Outcome) -> bool:
        """Whether a box is too large to be solved as soon as it is there."""
        return self.slow and len(self.kept(node, self.near(node))) > FEW

    def is_small(self, node: Outcome) -> bool:
        """Whether HiGHS is likely to close a box soon, once there is a solution."""
        return self.best is not None and len(self.kept(node, self.enough())) <= _FEW_KEPT

    def has_many(self, node: Outcome) -> bool:
        """Whether a box has too many variables for whole numbers, once there is a solution: cuts are faster.

        Of a small program without counts they are not: blocks that decide for themselves are equal, so that the parts
        of a cut are hardly easier.
        """
        if self.best is None or node.status != "optimal" or node.relaxation is None:
            return False
        if self.is_mixed(node):
            return True
        kept = self.kept(node, self.enough())
        flows = int(np.isin(kept, self.program.matrix().flows[:, 0]).sum())
        if self.slow and flows > _FEW_TO_OPEN and self.openings.split(node) is not None:
            return True
        return flows > (_FLOWS if self.slow or not self.program.counts else _FEW_FLOWS)

    def is_mixed(self, node: Outcome) -> bool:
        """Whether the relaxation of a box, of a program without counts, is far from the best solution.

        It runs an op in part in a way that hides its collectives and in part in one that has none. HiGHS came to a gap
        of 13 % in a minute where four cuts by the choices of that op leave none.
        """
        return self.slow and not self.program.counts and self.is_far(node.objective)

    def round(self, node: Outcome) -> None:
        """A good solution of a box that is done, soon: with those choices alone that its relaxation makes in part."""
        matrix = self.program.matrix()
        matrix.bound(node.counts)
        held = held_of(self.program)
        kept = without_zeros(matrix, held | ~matrix.integer | (node.values > WHOLE), held)
        kept = np.flatnonzero(matrix.with_company(kept))
        found = self.program.integrate(self.solver, kept, self.left(), self.gap, node.counts, cutoff=self.enough())
        self._take(found)

    def solve(self, node: Outcome, least: float = -math.inf) -> bool:
        """The best solution of a box that is done, if it is better than the best so far by more than the gap.

        False where it is the first solution of all and shows that cuts are faster: then the box is not done with.
        `least`: a bound that is known of it, where that is more than its relaxation.
        """
        least, is_first = max(least, node.objective), self.best is None
        if self._solved_by_itself(node):
            self.proven = min(self.proven, least)
            return True
        few = len(self.program.names) <= FEW
        margin = math.inf if few else self.near(node) - node.objective
        mine = math.inf  # the best solution of this box
        while True:
            enough = self.enough()
            limit = min(node.objective + margin, enough)
            kept = self.kept(node, limit)
            everything = len(kept) == int((self.program.matrix().upper > 0).sum())
            late = self.best is None and self.clock.gone > self.clock.limit
            found = self.program.integrate(
                self.solver, kept, self.left(), 1.0 if late else self.gap, node.counts, cutoff=enough
            )
            if self.best is None or found.objective < self.best.objective:
                self.best = found if len(found.values) else None
            mine = min(mine, found.objective)
            if found.status == "stopped":
                if self.best is None:
                    continue
                self.proven = min(self.proven, least)
                return True
            bound = max(least, min(found.bound, enough if everything else limit))
            done = everything or limit >= enough or (self.best is not None and self.closed(bound))
            if done or mine <= limit or found.status == "feasible" or (self.best and self.left() <= 0):
                self.proven = min(self.proven, bound)
                return True
            if is_first and self.is_mixed(node):
                return False
            margin = min(8 * margin, (mine - node.objective) * (1 + 1e-9) + 1e-9)  # mine: inf where there is none

    def begin(self, node: Outcome, part: float = 1.0, nodes: int | None = None) -> float:
        """What solutions of a box cost at least, as HiGHS knows after some nodes; a better one it found is kept.

        Each time it may take twice as many, so that it comes to an end where cutting a box makes it no easier.
        `part`: of the time that is left, what it may take; `nodes`: instead of those.
        """
        enough, kept, seconds = self.enough(), self.kept(node, self.enough()), part * self.left()
        found = self.program.integrate(
            self.solver, kept, seconds, self.gap, node.counts, cutoff=enough, nodes=nodes or self._nodes
        )
        self._nodes *= 1 if nodes else 2
        self._take(found)
        return max(node.objective, min(found.bound, enough))

    def closes(self, root: Outcome, part: float, nodes: int | None = None) -> bool:
        """Whether HiGHS closed all of a box, in a part of the time and as many nodes."""
        bound = self.begin(root, part, nodes)
        if self.closed(bound):
            self.proven = min(self.proven, bound)
            return True
        return False

    def is_far(self, bound: float) -> bool:
        """Whether the best solution may be so bad that looking near it is worth more than proving."""
        return self.best is not None and self.best.objective - bound > _FAR * abs(self.best.objective)

    def improve(self, bound: float) -> None:
        """Look once, for a part of the time, for a better solution near the best one, if `bound` says there may be."""
        if self.best is not None and not self._was_improved and not self.closed(bound):
            self._was_improved = True
            self.best = improved(self.program, self.solver, self.gap, self.best, SHARE * self.clock.limit)

    def _take(self, found: Outcome) -> None:
        if len(found.values) and (self.best is None or found.objective < self.best.objective):
            self.best = found

    def near(self, node: Outcome) -> float:
        """What solutions of a box cost that are looked for at first."""
        return node.objective + max(abs(node.objective) * max(self.gap, _MARGIN), 1e-6)

    def enough(self) -> float:
        """The bound at which a box is closed: no more than the limit, once there is a solution."""
        return math.inf if self.best is None else min(self.limit, self.proof())

    def proof(self) -> float:
        """The bound that proves the best solution."""
        assert self.best is not None
        return self.best.objective - self.gap * abs(self.best.objective)

    def _solved_by_itself(self, node: Outcome) -> bool:
        """Whether the relaxation of a box is whole, and so the best solution in it."""
        found = self.program.as_whole(node)
        if found is None or any(not low <= round(node.values[v]) <= high for v, (low, high) in node.counts.items()):
            return False
        self.best = found if self.best is None else min(self.best, found, key=lambda one: one.objective)
        return self.closed(node.objective)

    def kept(self, node: Outcome, limit: float) -> Array:
        """The variables that a solution within the limit can use."""
        matrix = self.program.matrix()
        matrix.bound(node.counts)
        more = least_more(matrix, node.reduced)
        return np.flatnonzero((held_of(self.program) | (node.objective + more <= limit)) & (matrix.upper > 0))

    def _entered(self, node: Outcome) -> Array:
        """The variables that relaxations have made use of."""
        if node.relaxation is None:
            return np.arange(len(self.program.names))
        return np.flatnonzero(node.relaxation.inside)
