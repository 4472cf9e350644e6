"""Branch and bound over the counts of a program; boxes whose counts are fixed are solved as integer programs.

The number r of blocks of a class that recompute multiplies many 0/1 choices. While r is open, these products are only
bounded (McCormick) and the linear relaxation is loose; with r fixed they are linear. So the search branches on the
counts first, in order of best bound. A node of the search is a box, which bounds each count from both sides, with the
optimum L of its relaxation. A box is split at the value that its relaxation gives a count, because both bounds of a
count tighten its products. A box is "done" when all its counts are fixed, or when several are open but all products of
its relaxation are exact. A box that is done is solved as an integer program (`solver.search.incumbent`).

If a done box is too large for that, it is cut by buckets (`openings`) and by choices (`choices`). The likelier part is
cut again and its relaxation is rounded. The good incumbent found this way makes most boxes small enough, so the other
parts are left for last. In a small program, a relaxation and its rounding take a tenth of the time of an integer
program, so every box is first rounded and cut, and so are its parts, until there is an incumbent.

Where counts hardly change the relaxation, there would be many boxes, none easier than the whole. In a small program,
all that is left after some splits is then solved by HiGHS at once if reduced costs leave few variables; if they leave
more, HiGHS tries once, provided that little is left to prove. After a number of cuts, HiGHS starts on a box that still
has too many variables, for a few nodes of its own (this often gives a better incumbent and bound), before the box is
cut again. If a solution is known from the start and the relaxation is far below it, HiGHS first tries the whole program
where this is small and its budget binds.

A box is closed if it cannot improve the incumbent by more than the gap; the same value is HiGHS's cutoff.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import Bounds, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search.boxes import Boxes, holds
from autopar.solver.search.choices import Choices
from autopar.solver.search.incumbent import Incumbent
from autopar.solver.search.nearby import nearby
from autopar.solver.search.open_nodes import OpenNodes
from autopar.solver.search.windows import NEIGHBOURHOOD_SHARE

_SPLITS_BEFORE_DIVE = 4  # boxes of a small program that are split before a dive, which these may make unnecessary
_GAP_TO_PARENT = 1e-2  # relative; without an incumbent, a done box is solved at once if this near to its parent's bound
_PRODUCT_TOLERANCE = 1e-3  # products count as exact if their errors sum to less, in blocks: less than any block
_ROUND_EVERY = 3  # in a large program, where rounding takes long, every third relaxation of a chain of cuts is rounded
_MAX_SPLITS = 16  # splits by counts in a small program, after which HiGHS is faster at closing all that is left
_MAX_CUTS = 30  # cuts by choices in a small program, after which HiGHS is faster at closing what is left
# Share of the time, and HiGHS nodes, to close a small program with a far relaxation at once:
_WHOLE_SHARE, _WHOLE_NODES = 1 / 3, 4_000


class Branching:
    """Branch and bound in one program; `best`: a solution that is known already.

    `limit`: the program has all solutions up to this cost, but perhaps not those above. The search ends when every open
    bound exceeds the limit, and once there is an incumbent, boxes are closed at the limit.
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
        self.is_large = self.incumbent.is_large
        self.open = OpenNodes()
        self.cuts = 0
        self.plunge: Outcome | None = None  # the node to take next, whatever its bound
        self.dived = False  # whether `_dive` has run: it runs once
        self.binds = False  # whether the memory budget binds in the relaxation

    def run(self, root: Outcome) -> Outcome:
        """The best solution of the program, whose relaxation is `root`, with the bound that is proven."""
        incumbent, splits = self.incumbent, 0
        self.open.push(root)
        self.binds = self.program.has_counts and self.program.budget_binds(root)
        is_far = not self.is_large and self.binds and incumbent.is_far(root.objective)
        if is_far and incumbent.closes(root, _WHOLE_SHARE, _WHOLE_NODES):
            self.open.clear()
        if self.is_large and incumbent.best is None and not self._is_done(root):
            self._dive(root)
        while incumbent.seconds_left() > 0 or incumbent.best is None:
            if self.open.least_bound() > self.limit:
                break
            if incumbent.clock.elapsed > incumbent.clock.limit / 2 and incumbent.is_far(self._bound()):
                incumbent.improve(self._bound())
            first = self.open.first()
            if first is None or incumbent.closed(first.objective):
                if not self.open.cut:
                    break
                self._reopen(*self.open.cut.pop(0))
                continue
            node = self._take_next(first)
            if node.status == "waiting":
                self.open.push(self._relaxed_part(node, node.counts))
                continue
            if self._is_done(node):
                self._close(node)
                continue
            splits += 1
            if splits > _MAX_SPLITS and not self.is_large and self._closes_all(root, node, splits):
                break
            self._split(root, node, blind=splits >= (1 if self.is_large else _SPLITS_BEFORE_DIVE))
        if incumbent.best is None:
            return Outcome("infeasible", (), math.inf, math.inf)
        if incumbent.seconds_left() <= 0:
            incumbent.improve(self._bound())
        bound = min(self._bound(), incumbent.best.objective)
        status = "optimal" if bound >= incumbent.proof_bound() else "feasible"
        return replace(incumbent.best, status=status, bound=bound)

    def _split(self, root: Outcome, node: Outcome, blind: bool) -> None:
        """Split a box by its counts; `blind`: so many splits are made that a dive for a first solution is due."""
        incumbent = self.incumbent
        for bounds in self.boxes.split(node, (0.0 if incumbent.best is None else 0.5) if self.is_large else None):
            if incumbent.closed(node.objective):
                self.open.push(replace(node, counts=bounds))
                continue
            child = self._relaxed_part(node, bounds)
            done = self._is_done(child)
            large = done and incumbent.is_large_box(child)
            if done and not large and self._is_near_parent(child, node):
                self._close(child)  # its solution may close the other boxes
            else:
                self.open.push(child)
            if large:
                incumbent.round(child)
            fixed = any(self.boxes.is_fixed(other.counts) for other in self.open)  # solutions come soon
            early = incumbent.clock.elapsed < incumbent.clock.limit / 4
            if not self.dived and (child.status == "stopped" or (blind and not (fixed and early))):
                self._dive(root)

    def _closes_all(self, root: Outcome, node: Outcome, splits: int) -> bool:
        """Whether HiGHS closed this box and all others that are left: it solves the whole program if few variables are
        left of it, and otherwise tries once, for a share of the time, if little is left to prove."""
        incumbent, least = self.incumbent, min(node.objective, self.open.least_bound())
        tries = incumbent.best is not None and splits == _MAX_SPLITS + 1 and not incumbent.is_far(least)
        if incumbent.is_small_box(root):
            incumbent.solve(root, known_bound=least)
        elif not (tries and incumbent.closes(root, NEIGHBOURHOOD_SHARE)):
            return False
        self.open.clear()
        return True

    def _bound(self) -> float:
        """A lower bound on all solutions that have not been found."""
        return min(self.incumbent.proven, self.open.least_bound())

    def _take_next(self, first: Outcome) -> Outcome:
        """The node of least bound (`first`); in a large program, if its box is done, a done one with the incumbent."""
        plunge, best, self.plunge = self.plunge, self.incumbent.best, None
        if plunge is not None:
            return self.open.take(lambda node: node is plunge)
        if self.is_large and best is not None and self._is_done(first) and not self.incumbent.is_mixed(first):
            return self.open.take(lambda node: self._is_done(node) and holds(node.counts, best.values))
        return self.open.take(lambda node: node is first)

    def _relaxed_part(self, node: Outcome, bounds: Bounds) -> Outcome:
        """The relaxation of a part of a node's box, at least the node's; if it is closed, its bound is recorded."""
        part = self._relax(node, bounds)
        if part.status == "closed":
            self.incumbent.proven = min(self.incumbent.proven, part.bound)
        return replace(part, objective=max(part.objective, node.objective))

    def _relax(self, node: Outcome, bounds: Bounds) -> Outcome:
        """The relaxation of a part of a node's box; the node's own if that is exact and lies in the part."""
        if self.boxes.is_fixed(bounds) and holds(bounds, node.values) and self._is_exact(node):
            return replace(node, counts=bounds)
        seconds = max(self.incumbent.seconds_left(), 1.0)
        return self.program.relax_again(node, seconds, bounds, cutoff=self.incumbent.cutoff())

    def _is_done(self, node: Outcome) -> bool:
        """Whether a box is ready for an integer program: its counts are fixed, or several are open but its products are
        exact. Only choices are fractional then, and splits would give a box for each combination of the counts' values;
        a single open count has few values, and boxes in which it is fixed are solved faster."""
        if node.status in ("closed", "infeasible", "waiting"):
            return False
        if self.boxes.is_fixed(node.counts):
            return True
        several = self.is_large or len(self.boxes.open(node.counts)) > 1
        return node.status == "optimal" and several and self._is_exact(node)

    def _is_exact(self, node: Outcome) -> bool:
        """Whether the products of counts and choices are exact: tighter bounds of counts would not change them."""
        return sum(self.program.wrong_products(node.values).values()) < _PRODUCT_TOLERANCE

    def _is_near_parent(self, child: Outcome, node: Outcome) -> bool:
        """Whether a part's relaxation is within the gap of its parent's; without an incumbent a wider gap will do."""
        incumbent = self.incumbent
        gap = incumbent.gap if incumbent.best is not None else max(incumbent.gap, _GAP_TO_PARENT)
        return child.status == "optimal" and child.objective - node.objective <= gap * abs(node.objective)

    def _dive(self, root: Outcome) -> None:
        """Find a first solution with few relaxations: with counts near the root's, or else with the highest counts."""
        self.dived = True
        near = nearby(self.program, self.boxes, self.incumbent.clock, root)
        if near.status == "optimal":
            self._round_parts(near)
            if self.incumbent.best is None:
                self.incumbent.solve(near)
        if self.incumbent.best is None:
            highest = self.boxes.at({count: self.boxes.range({}, count)[1] for count, _ in self.program.records.counts})
            self._round_parts(self._relaxed_part(root, highest))
            self.incumbent.find_first(root, highest)

    def _round_parts(self, node: Outcome) -> None:
        """Round a box's relaxation; in a small program, cut by choices and round the likelier part, and so on."""
        for _ in range(1 if self.is_large else _MAX_CUTS):
            if node.status != "optimal" or self.incumbent.seconds_left() <= 0:
                return
            self.incumbent.round(node)
            parts = self.choices.split(node) if self.incumbent.best is None else None
            if parts is None:
                return
            likely = self._relaxed_part(node, parts[0])
            node = likely if likely.status == "optimal" else self._relaxed_part(node, parts[1])

    @cached_property
    def choices(self) -> Choices:
        return Choices(self.program.matrix(), with_flows=not self.binds)

    def _close(self, box: Outcome) -> None:
        """Solve a box that is done, or keep the parts that are still open: of a large program for last."""
        parts = self._solve_or_cut(box)
        if self.is_large:
            self.open.cut.append((box, parts))
            return
        for part in parts:
            self.open.push(part)
        if parts and parts[-1].status == "optimal" and not self.incumbent.closed(parts[-1].objective):
            self.plunge = parts[-1]  # the likeliest part: a good solution may be near

    def _solve_or_cut(self, box: Outcome) -> list[Outcome]:
        """Solve a box that is done, or cut it by choices, then its likelier part and so on; returns the open parts.
        Once a good incumbent is found, the box itself may be small enough to be solved, which replaces its parts."""
        incumbent, node, parts = self.incumbent, box, list[Outcome]()
        is_first = incumbent.best is None
        if is_first and not self.program.has_counts and not incumbent.has_many(box) and incumbent.solve(box):
            return []
        if incumbent.best is None and not self.is_large and self.program.as_whole(box) is None:
            incumbent.round(box)
        depth = 0
        while True:
            depth += 1
            if node.status in ("closed", "infeasible"):
                if not parts or not self._goes_on_with(parts[-1]):
                    return parts
                other = parts.pop()
                node = self._relaxed_part(other, other.counts)
                continue
            if incumbent.closed(node.objective):
                return [*parts, node]
            if depth > 1 and (incumbent.seconds_left() <= 0 or not self._is_done(node)):
                return [*parts, node]
            if parts and not incumbent.has_many(box):
                incumbent.solve(box)
                return []
            if any(incumbent.is_mixed(other) for other in parts) and not incumbent.is_mixed(node):
                return [*parts, node]  # solving it would prove little while the bounds of others are far below
            parts_of_cut = self._cut(node)
            if parts_of_cut is None:
                return parts
            node, other = parts_of_cut
            parts.append(other)
            if node.status == "optimal" and (depth % _ROUND_EVERY == 0 or not self.is_large):
                incumbent.round(node)

    def _goes_on_with(self, other: Outcome) -> bool:
        """Whether the other part of a cut box is looked at as soon as the likelier one is closed."""
        return not self.is_large or (self.incumbent.seconds_left() > 0 and self.incumbent.is_mixed(other))

    def _cut(self, node: Outcome) -> tuple[Outcome, Outcome] | None:
        """Cut a box in two if it is too large to be solved: the relaxation of the likelier part, and the other part,
        which waits for its own. None if the box was solved or closed instead."""
        incumbent = self.incumbent
        is_too_large = incumbent.has_many(node) and (self.cuts < _MAX_CUTS or not incumbent.is_small_box(node))
        if is_too_large and self.cuts >= _MAX_CUTS:
            node = replace(node, objective=incumbent.partial_solve(node))
            if incumbent.closed(node.objective):
                incumbent.proven = min(incumbent.proven, node.objective)
                return None
        bounds = (incumbent.openings.split(node) or self.choices.split(node)) if is_too_large else None
        if bounds is None:
            incumbent.solve(node)
            return None
        self.cuts += not self.is_large
        return self._relaxed_part(node, bounds[0]), replace(node, status="waiting", counts=bounds[1])

    def _reopen(self, box: Outcome, parts: list[Outcome]) -> None:
        """Reopen the parts of a box that was cut, or solve the box itself if it is small enough by now."""
        if not parts or self.incumbent.has_many(box):
            for part in parts:
                self.open.push(part)
        else:
            self.incumbent.solve(box)
