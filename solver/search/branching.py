"""Branch and bound over the counts of a program, and whole numbers where these are fixed.

How many blocks of a class recompute multiplies many other choices. While such a count r is open, its products with 0/1
choices are only bounded (McCormick), and the linear relaxation is loose; with r fixed they are linear. So the counts
are branched on first, best bound first: each node of the search is a box of counts with the optimum L of its
relaxation. A box is cut in two where its relaxation has the count, since products are bounded by both of its ends. A
node whose counts are all fixed is solved in whole numbers, and one of several whose relaxation has all products right
(`solver.search.incumbent`).

Where such a box is still too large for that, it is cut by buckets and choices (`solver.search`: `openings`, `choices`).
The likelier part is cut again, and its relaxation rounded: the good solution that this finds makes most boxes small
enough, so that the other parts are looked at last. In a small program a relaxation and its rounding take a tenth of the
time of whole numbers, so that every box is rounded and cut like this first, and what is left goes on till one is found.

Where counts hardly change the relaxation, boxes would be many and none easier than the whole: of a small program, all
that is left after some cuts is then solved at once, if reduced costs leave few variables to it. With more HiGHS tries
once, if little is left to prove. A box with more is begun by HiGHS, which often finds a better solution in a few nodes
and proves a better bound, and then cut again. Where a good solution is known first and the relaxation is far from it,
all of a small program whose budget binds is tried before.

Boxes that cannot be better than the best solution by more than the gap are closed, and HiGHS looks for nothing worse.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cached_property
from heapq import heapify, heappush

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import Bounds, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search.boxes import Boxes, holds
from autopar.solver.search.choices import Choices
from autopar.solver.search.incumbent import Incumbent
from autopar.solver.search.nearby import nearby
from autopar.solver.search.windows import SHARE

_BLIND = 4  # boxes that are split before a first solution is looked for
_NEAR = 1e-2  # of a bound: boxes this near to the best are worth solving while there is no solution
_RIGHT = 1e-3  # blocks in sum by which products may be wrong that are called right
_ROUND = 3  # cuts by choices after which a relaxation is rounded again, where that takes long
_SPLITS = 16  # by counts in a program that is not large: if they tell no more, HiGHS closes all that is left sooner
_CUTS = 30  # by choices in a program that is not large: with more, HiGHS closes what is left sooner
_WHOLE = 1 / 3, 4_000  # of the time, and nodes in which HiGHS may close a small program with a far relaxation at once

Heap = list[tuple[float, int, Outcome]]


class Branching:
    """The search in one program; `best`: a solution that is known already.

    It ends where all that is left costs more than the `limit`, up to which the program has all solutions; once it has
    one, it looks for nothing dearer.
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
        self.program, self.limit, self.boxes = program, limit, Boxes(program)
        self.incumbent = Incumbent(program, solver, gap, clock, best, limit)
        self.slow = self.incumbent.slow
        self.heap: Heap = []
        self.order = itertools.count()
        self.cut: list[tuple[Outcome, list[Outcome]]] = []  # boxes cut by choices, with the parts that are left of them
        self.cuts = 0
        self.plunge: Outcome | None = None  # the box that is split next
        self.dived = False  # whether `_dive` has run: it does once
        self.binds = False  # whether it is memory that the relaxation mixes choices for

    def run(self, root: Outcome) -> Outcome:
        """The best solution of the box `root`, all of the program, with the bound that is proven of it."""
        incumbent, heap, splits = self.incumbent, self.heap, 0
        self._push(root)
        self.binds = bool(self.program.counts) and self.program.budget_binds(root)
        if not self.slow and self.binds and incumbent.is_far(root.objective) and incumbent.closes(root, *_WHOLE):
            heap.clear()
        if self.slow and incumbent.best is None and not self._is_done(root):
            self._dive(root)
        while incumbent.left() > 0 or incumbent.best is None:
            if min(self._left(), default=math.inf) > self.limit:
                break
            if incumbent.clock.gone > incumbent.clock.limit / 2 and incumbent.is_far(self._bound()):
                incumbent.improve(self._bound())
            if not heap or incumbent.closed(heap[0][0]):
                if not self.cut:
                    break
                self._take_up(*self.cut.pop(0))
                continue
            node = self._next()
            if node.status == "waiting":
                self._push(self._part(node, node.counts))
                continue
            if self._is_done(node):
                self._close(node)
                continue
            splits += 1
            if splits > _SPLITS and not self.slow and self._closes_all(root, node, splits):
                break
            self._split(root, node, blind=splits >= (1 if self.slow else _BLIND))
        if incumbent.best is None:
            return Outcome("infeasible", (), math.inf, math.inf)
        if incumbent.left() <= 0:
            incumbent.improve(self._bound())
        bound = min(self._bound(), incumbent.best.objective)
        return replace(incumbent.best, status="optimal" if bound >= incumbent.proof() else "feasible", bound=bound)

    def _split(self, root: Outcome, node: Outcome, blind: bool) -> None:
        """Split a box by its counts; `blind`: after as many splits as may be made before diving for a solution."""
        incumbent = self.incumbent
        for bounds in self.boxes.split(node, (0.0 if incumbent.best is None else 0.5) if self.slow else None):
            if incumbent.closed(node.objective):
                self._push(replace(node, counts=bounds))
                continue
            child = self._part(node, bounds)
            done = self._is_done(child)
            large = done and incumbent.is_large(child)
            if done and not large and self._as_good(child, node):
                self._close(child)  # its solution may make the other boxes needless
            else:
                self._push(child)
            if large:
                incumbent.round(child)
            fixed = any(self.boxes.is_fixed(other.counts) for _, _, other in self.heap)  # which have solutions at hand
            early = incumbent.clock.gone < incumbent.clock.limit / 4
            if not self.dived and (child.status == "stopped" or (blind and not (fixed and early))):
                self._dive(root)

    def _closes_all(self, root: Outcome, node: Outcome, splits: int) -> bool:
        """Whether HiGHS closed all that is left, with this box: of a small program; of another one it tries once,
        where little is left to prove."""
        incumbent, least = self.incumbent, min([node.objective, *self._left()])
        tries = incumbent.best is not None and splits == _SPLITS + 1 and not incumbent.is_far(least)
        if incumbent.is_small(root):
            incumbent.solve(root, least=least)
        elif not (tries and incumbent.closes(root, SHARE)):
            return False
        self.heap.clear()
        self.cut.clear()
        return True

    def _left(self) -> list[float]:
        """The bounds of the boxes that are left."""
        parts = [part for _, some in self.cut for part in some]
        return [objective for objective, _, _ in self.heap] + [part.objective for part in parts]

    def _bound(self) -> float:
        """What every solution costs that is not known yet."""
        return min([self.incumbent.proven, *self._left()])

    def _push(self, node: Outcome) -> None:
        if node.status not in ("closed", "infeasible"):
            heappush(self.heap, (node.objective, next(self.order), node))

    def _next(self) -> Outcome:
        """The box of least bound; where that is done, rather one that is done too and has the best solution in it."""
        first, best = self.heap[0], self.incumbent.best
        if self.plunge is not None:
            first = next((entry for entry in self.heap if entry[2] is self.plunge), first)
            self.plunge = None
        elif self.slow and best is not None and self._is_done(first[2]) and not self.incumbent.is_mixed(first[2]):
            first = next((e for e in self.heap if self._is_done(e[2]) and holds(e[2].counts, best.values)), first)
        self.heap.remove(first)
        heapify(self.heap)
        return first[2]

    def _part(self, node: Outcome, bounds: Bounds) -> Outcome:
        """The relaxation of a part of a node's box, with what is closed noted."""
        part = self._relax(node, bounds)
        if part.status == "closed":
            self.incumbent.proven = min(self.incumbent.proven, part.bound)
        return replace(part, objective=max(part.objective, node.objective))

    def _relax(self, node: Outcome, bounds: Bounds) -> Outcome:
        """The relaxation of a part of a node's box; the node's own where it is right for that part."""
        if self.boxes.is_fixed(bounds) and holds(bounds, node.values) and self._is_right(node):
            return replace(node, counts=bounds)
        return self.program.relax_again(node, max(self.incumbent.left(), 1.0), bounds, cutoff=self.incumbent.enough())

    def _is_done(self, node: Outcome) -> bool:
        """Whether a box is for whole numbers: its counts are fixed, or several are open whose bounds mend nothing.

        Where choices are what is not whole, boxes of several counts would be as many as there are counts of each; of
        one count they are few, and a fixed one is solved faster.
        """
        if node.status in ("closed", "infeasible", "waiting"):
            return False
        if self.boxes.is_fixed(node.counts):
            return True
        several = self.slow or len(self.boxes.open(node.counts)) > 1
        return node.status == "optimal" and several and self._is_right(node)

    def _is_right(self, node: Outcome) -> bool:
        """Whether products of counts and choices are what they stand for: no bounds of counts would mend them."""
        return sum(self.program.wrong_products(node.values).values()) < _RIGHT

    def _as_good(self, child: Outcome, node: Outcome) -> bool:
        """Whether a box has about as good a relaxation as the box that it is part of; less so for a first solution."""
        incumbent = self.incumbent
        gap = incumbent.gap if incumbent.best is not None else max(incumbent.gap, _NEAR)
        return child.status == "optimal" and child.objective - node.objective <= gap * abs(node.objective)

    def _dive(self, root: Outcome) -> None:
        """A first solution, where relaxations are slow: with counts near those of the root, or else the highest."""
        self.dived = True
        near = nearby(self.program, self.boxes, self.incumbent.clock, root)
        if near.status == "optimal":
            self._round_parts(near)
            if self.incumbent.best is None:
                self.incumbent.solve(near)
        if self.incumbent.best is None:
            highest = self.boxes.at({count: self.boxes.range({}, count)[1] for count, _ in self.program.counts})
            self._round_parts(self._part(root, highest))
            self.incumbent.first(root, highest)

    def _round_parts(self, node: Outcome) -> None:
        """A first solution of a box: rounded, or else, where parts are quick, of the likelier one, and so on."""
        for _ in range(1 if self.slow else _CUTS):
            if node.status != "optimal" or self.incumbent.left() <= 0:
                return
            self.incumbent.round(node)
            parts = self.choices.split(node) if self.incumbent.best is None else None
            if parts is None:
                return
            likely = self._part(node, parts[0])
            node = likely if likely.status == "optimal" else self._part(node, parts[1])

    @cached_property
    def choices(self) -> Choices:
        return Choices(self.program.matrix(), with_flows=not self.binds)

    # -- choices ------------------------------------------------------------------------------------------------------

    def _close(self, box: Outcome) -> None:
        """Solve a box that is done, or note what is left of it."""
        parts = self._finish(box)
        if self.slow:
            self.cut.append((box, parts))
            return
        for part in parts:
            self._push(part)
        if parts and parts[-1].status == "optimal" and not self.incumbent.closed(parts[-1].objective):
            self.plunge = parts[-1]  # all that is likely of the box: a good solution may be near

    def _finish(self, box: Outcome) -> list[Outcome]:
        """Solve a box that is done, or cut it by choices, and its likelier part again; what is left of it.

        Once a good solution is found, the box itself may be small enough, so that its parts are needless.
        """
        incumbent, node, left = self.incumbent, box, list[Outcome]()
        if incumbent.best is None and not incumbent.has_many(box) and not self.program.counts and incumbent.solve(box):
            return []
        if incumbent.best is None and not self.slow and self.program.as_whole(box) is None:
            incumbent.round(box)
        for depth in itertools.count(1):
            if node.status in ("closed", "infeasible"):
                if not left or (self.slow and (incumbent.left() <= 0 or not incumbent.is_mixed(left[-1]))):
                    break
                other = left.pop()  # which is the box now
                node = self._part(other, other.counts)
                continue
            if incumbent.closed(node.objective) or (depth > 1 and (incumbent.left() <= 0 or not self._is_done(node))):
                return [*left, node]
            if left and not incumbent.has_many(box):
                incumbent.solve(box)
                return []
            if any(incumbent.is_mixed(other) for other in left) and not incumbent.is_mixed(node):
                return [*left, node]  # which proves little while others are far
            many = incumbent.has_many(node) and (self.cuts < _CUTS or not incumbent.is_small(node))
            if many and self.cuts >= _CUTS:
                node = replace(node, objective=incumbent.begin(node))
                if incumbent.closed(node.objective):
                    incumbent.proven = min(incumbent.proven, node.objective)
                    break
            parts = (incumbent.openings.split(node) or self.choices.split(node)) if many else None
            if parts is None:
                incumbent.solve(node)
                break
            self.cuts += not self.slow
            left.append(replace(node, status="waiting", counts=parts[1]))
            node = self._part(node, parts[0])
            if node.status == "optimal" and (depth % _ROUND == 0 or not self.slow):
                incumbent.round(node)
        return left

    def _take_up(self, box: Outcome, parts: list[Outcome]) -> None:
        """What is left of a box that was cut, or the box itself where it is small enough by now."""
        if not parts or self.incumbent.has_many(box):
            for part in parts:
                self._push(part)
        else:
            self.incumbent.solve(box)
