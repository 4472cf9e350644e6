"""Branch and bound over the counts of a program, and whole numbers where these are fixed.

How many blocks of a class recompute multiplies many other choices. While such a count r is open, its products with 0/1
choices are only bounded (McCormick), and the linear relaxation is loose; with r fixed they are linear. So the counts
are branched on first, best bound first: each node of the search is a box of counts with the optimum L of its
relaxation. A box is cut in two where its relaxation has the count, since products are bounded by both of its ends. A
node whose counts are all fixed is solved in whole numbers, and one of several whose relaxation has all products right.

A solution in which a variable of reduced cost d is 1 costs at least L + d. So boxes of programs that are not small are
solved with the variables alone that solutions up to a limit can use; what is found is compared with the limit, and with
a higher one it is done again if it has to be.

Boxes that cannot be better than the best solution by more than the gap are closed, and HiGHS looks for nothing worse.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from autopar.solver.boxes import Boxes
from autopar.solver.clock import Clock
from autopar.solver.held import Basis
from autopar.solver.linear import Array
from autopar.solver.outcome import WHOLE, Bounds, Outcome
from autopar.solver.pricing import least_more
from autopar.solver.program import Program
from autopar.solver.shrunk import without_zeros

FEW = 20_000  # variables with which a relaxation and whole numbers are solved at once
_MARGIN = 1e-3  # the first margin of reduced costs, relative
_BLIND = 4  # boxes that are split before a first solution is looked for
_NEAR = 1e-2  # of a bound: boxes this near to the best are worth solving while there is no solution
_RIGHT = 1e-3  # blocks in sum by which products may be wrong that are called right


class Branching:
    """The search in one program; `best`: a solution that is known already."""

    def __init__(self, program: Program, solver: str, gap: float, clock: Clock, best: Outcome | None = None) -> None:
        self.program, self.solver, self.gap, self.clock = program, solver, gap, clock
        self.best = best
        self.boxes = Boxes(program)
        self.slow = len(program.names) > FEW
        self.narrow: Basis | None = None  # of the last box with one count less than what it is part of
        self.proven = math.inf  # the least bound of boxes that are done with

    def run(self, root: Outcome) -> Outcome:
        order = itertools.count()
        heap, dived, splits = [(root.objective, next(order), root)], False, 0
        while heap and not self._closed(heap[0][0]) and (self._left() > 0 or self.best is None):
            _, _, node = heappop(heap)
            if self._is_done(node):
                self._solve(node)
                continue
            splits += 1
            for bounds in self.boxes.split(node, (0.0 if self.best is None else 0.5) if self.slow else None):
                if self._closed(node.objective):
                    heappush(heap, (node.objective, next(order), replace(node, counts=bounds)))
                    continue
                child = self._relax(node, bounds)
                if child.status == "closed":
                    self.proven = min(self.proven, child.bound)
                elif child.status != "infeasible":
                    child = replace(child, objective=max(child.objective, node.objective))
                    done = self._is_done(child)
                    many = self.slow and done and len(self._kept(child, self._near(child))) > FEW
                    if done and not many and self._as_good(child, node):
                        self._solve(child)  # its solution may make the other boxes needless
                    else:
                        heappush(heap, (child.objective, next(order), child))
                    if many:
                        self._round(child)
                fixed = any(self.boxes.is_fixed(other.counts) for _, _, other in heap)  # which have solutions at hand
                early = self.clock.gone < self.clock.limit / 4
                blind = splits >= (1 if self.slow else _BLIND)
                if not dived and (child.status == "stopped" or (blind and not (fixed and early))):
                    dived = True
                    self._dive(root)
        bound = min([self.proven, *(objective for objective, _, _ in heap)])
        if self.best is None:
            return Outcome("infeasible", (), math.inf, math.inf)
        bound = min(bound, self.best.objective)
        return replace(self.best, status="optimal" if self._closed(bound) else "feasible", bound=bound)

    def _relax(self, node: Outcome, bounds: Bounds) -> Outcome:
        """The relaxation of a part of a node's box; the node's own where it is right for that part."""
        inside = all(low - WHOLE <= node.values[v] <= high + WHOLE for v, (low, high) in bounds.items())
        if inside and self.boxes.is_fixed(bounds) and self._is_right(node):
            return replace(node, counts=bounds)
        narrow = self.slow and len(self.boxes.open(bounds)) < len(self.boxes.open(node.counts))
        below = self.slow and any(node.values[v] > high + WHOLE for v, (_, high) in bounds.items())
        basis = self.narrow if narrow or below else None  # of fewer recomputed blocks: the node's takes too much memory
        found = self.program.relax_again(node, max(self._left(), 1.0), bounds, cutoff=self._enough(), basis=basis)
        if narrow and found.status == "optimal":
            self.narrow = found.basis
        return found

    def _is_done(self, node: Outcome) -> bool:
        """Whether a box is for whole numbers: its counts are fixed, or several are open whose bounds mend nothing.

        Where choices are what is not whole, boxes of several counts would be as many as there are counts of each; of
        one count they are few, and a fixed one is solved faster.
        """
        if self.boxes.is_fixed(node.counts):
            return True
        several = self.slow or len(self.boxes.open(node.counts)) > 1
        return node.status == "optimal" and several and self._is_right(node)

    def _is_right(self, node: Outcome) -> bool:
        """Whether products of counts and choices are what they stand for: no bounds of counts would mend them."""
        return sum(self.program.wrong_products(node.values).values()) < _RIGHT

    def _left(self) -> float:
        return self.clock.left(self.best is not None)

    def _as_good(self, child: Outcome, node: Outcome) -> bool:
        """Whether a box has about as good a relaxation as the box that it is part of; less so for a first solution."""
        gap = self.gap if self.best is not None else max(self.gap, _NEAR)
        return child.status == "optimal" and child.objective - node.objective <= gap * abs(node.objective)

    def _closed(self, bound: float) -> bool:
        """Whether nothing in a box with this bound could be better by more than the gap."""
        return bound >= self._enough()

    def _dive(self, root: Outcome) -> None:
        """A first solution, where relaxations are slow: counts as the root has them, rounded up; else the highest."""
        for highest in (False, True):
            counts: dict[int, tuple[float, float]] = {}
            for count, whether in self.program.early:
                most = self.boxes.range({}, count)[1]
                value = most if highest else min(most, float(math.ceil(root.values[count] - 1e-6)))
                counts |= {whether: (min(value, 1.0),) * 2, count: (value, value)}
            if self.best is None and self._left() > 0:
                found = self.program.integrate(self.solver, self._entered(root), self._left(), self.gap, counts)
                self.best = found if len(found.values) else None

    def _round(self, node: Outcome) -> None:
        """A good solution of a box that is done, soon: with those choices alone that its relaxation makes in part."""
        matrix = self.program.matrix()
        matrix.bound(node.counts)
        held = self._held()
        kept = without_zeros(matrix, held | ~matrix.integer | (node.values > WHOLE), held)
        kept = np.flatnonzero(matrix.with_company(kept))
        found = self.program.integrate(self.solver, kept, self._left(), self.gap, node.counts, cutoff=self._enough())
        if len(found.values) and (self.best is None or found.objective < self.best.objective):
            self.best = found

    # -- whole numbers ------------------------------------------------------------------------------------------------

    def _solve(self, node: Outcome) -> None:
        """The best solution of a box that is done, if it is better than the best so far by more than the gap."""
        if self._solved_by_itself(node):
            self.proven = min(self.proven, node.objective)
            return
        few = len(self.program.names) <= FEW
        margin = math.inf if few else self._near(node) - node.objective
        mine = math.inf  # the best solution of this box
        while True:
            enough = self._enough()
            limit = min(node.objective + margin, enough)
            kept = self._kept(node, limit)
            everything = len(kept) == len(self.program.names)
            late = self.best is None and self.clock.gone > self.clock.limit
            found = self.program.integrate(
                self.solver, kept, self._left(), 1.0 if late else self.gap, node.counts, cutoff=enough
            )
            if self.best is None or found.objective < self.best.objective:
                self.best = found if len(found.values) else None
            mine = min(mine, found.objective)
            if found.status == "stopped":
                if self.best is None:
                    continue
                self.proven = min(self.proven, node.objective)
                return
            bound = max(node.objective, min(found.bound, enough if everything else limit))
            done = everything or limit >= enough or (self.best is not None and self._closed(bound))
            if done or mine <= limit or found.status == "feasible" or (self.best and self._left() <= 0):
                self.proven = min(self.proven, bound)
                return
            margin = min(8 * margin, (mine - node.objective) * (1 + 1e-9) + 1e-9)  # mine: inf where there is none

    def _near(self, node: Outcome) -> float:
        """What solutions of a box cost that are looked for at first."""
        return node.objective + max(abs(node.objective) * max(self.gap, _MARGIN), 1e-6)

    def _enough(self) -> float:
        """The bound at which a box is closed."""
        return math.inf if self.best is None else self.best.objective - self.gap * abs(self.best.objective)

    def _solved_by_itself(self, node: Outcome) -> bool:
        """Whether the relaxation of a box is whole, and so the best solution in it."""
        found = self.program.as_whole(node)
        if found is None or any(not low <= round(node.values[v]) <= high for v, (low, high) in node.counts.items()):
            return False
        self.best = found if self.best is None else min(self.best, found, key=lambda one: one.objective)
        return self._closed(node.objective)

    def _kept(self, node: Outcome, limit: float) -> Array:
        """The variables that a solution within the limit can use."""
        more = least_more(self.program.matrix(), node.reduced)
        return np.flatnonzero(self._held() | (node.objective + more <= limit))

    def _held(self) -> Array:
        """The variables that are in every part of the program."""
        matrix = self.program.matrix()
        held = (matrix.lower != 0) | ~matrix.whole
        held[[v for pair in self.program.early for v in pair]] = True
        return held

    def _entered(self, node: Outcome) -> Array:
        """The variables that relaxations have made use of."""
        if node.relaxation is None:
            return np.arange(len(self.program.names))
        return np.flatnonzero(node.relaxation.inside)
