"""Counts for a first solution: near those of a relaxation, where their products are right.

While counts of recomputed blocks are open, their products with choices are only bounded. With the counts of the root
rounded up these are right, but where a budget binds, one block more or less of some level may change the relaxation by
more than all that the search is about. So it is solved again with one count changed by one, and from the best of these
on, as a hill is climbed. Each step is cut off at the best so far, which mostly takes HiGHS less than a second.
"""

from __future__ import annotations

import itertools
import math

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import WHOLE, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search.boxes import Boxes
from autopar.solver.search.windows import SHARE

_NEAR = 5e-3  # of the root's relaxation: one that is not much dearer is good enough
_SECONDS = 5.0  # that a step may take at most


def nearby(program: Program, boxes: Boxes, clock: Clock, root: Outcome) -> Outcome:
    """The relaxation with fixed counts near the root's that is the least of those that are a step away."""
    counts = [count for count, _ in program.counts]
    values = {one: min(boxes.range({}, one)[1], float(math.ceil(root.values[one] - WHOLE))) for one in counts}
    best, tried = program.relax_again(root, max(clock.left(False), 1.0), boxes.at(values), from_last=True), [values]
    steps, end, in_vain = itertools.cycle(itertools.product((1.0, -1.0), counts)), clock.gone + SHARE * clock.limit, 0
    enough = root.objective + _NEAR * abs(root.objective)
    while in_vain < 2 * len(counts) and clock.gone < end and not (_is_done(best) and best.objective <= enough):
        step, count = next(steps)
        changed = {**values, count: values[count] + step}
        in_vain += 1
        if changed in tried or not boxes.are_possible(changed):
            continue
        limit = best.objective if _is_done(best) else math.inf
        found = program.relax_again(root, _SECONDS, boxes.at(changed), cutoff=limit, from_last=True)
        tried.append(changed)
        if _is_done(found) and found.objective < limit:
            best, values, in_vain = found, changed, 0
    return best


def _is_done(node: Outcome) -> bool:
    return node.status == "optimal"
