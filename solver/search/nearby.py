"""Counts for a first solution: local search over fixed counts near those of the root relaxation.

While counts of recomputed blocks are open, their products with choices are only bounded. With the root's counts rounded
up and fixed, the products are exact. But if a budget binds, one block more or less at some level may change the
relaxation by more than the gaps that the search is about. So the relaxation is solved again with one count changed by
one, and from the best such neighbour on (hill climbing). Each step has the best value so far as its cutoff, and mostly
takes HiGHS less than a second.
"""

from __future__ import annotations

import itertools
import math

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import INTEGRALITY, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.search.boxes import Boxes
from autopar.solver.search.windows import NEIGHBOURHOOD_SHARE

_GOOD_COUNTS_GAP = 5e-3  # relative to the root's relaxation: fixed counts that cost no more above it are good enough
_MAX_STEP_SECONDS = 5.0  # limit of one step: another count may be relaxed sooner


def nearby(program: Program, boxes: Boxes, clock: Clock, root: Outcome) -> Outcome:
    """The relaxation with fixed counts near the root's that no single step improves, or the best one found in time."""
    counts = [count for count, _ in program.records.counts]
    values = {
        number: min(boxes.range({}, number)[1], float(math.ceil(root.values[number] - INTEGRALITY)))
        for number in counts
    }
    best, tried = (
        program.relax_again(root, max(clock.remaining(False), 1.0), boxes.at(values), from_last=True),
        [values],
    )
    end, in_vain = clock.elapsed + NEIGHBOURHOOD_SHARE * clock.limit, 0
    steps = itertools.cycle(itertools.product((1.0, -1.0), counts))
    enough = root.objective + _GOOD_COUNTS_GAP * abs(root.objective)
    while in_vain < 2 * len(counts) and clock.elapsed < end and not (_is_done(best) and best.objective <= enough):
        step, count = next(steps)
        changed = {**values, count: values[count] + step}
        in_vain += 1
        if changed in tried or not boxes.are_possible(changed):
            continue
        limit = best.objective if _is_done(best) else math.inf
        outcome = program.relax_again(root, _MAX_STEP_SECONDS, boxes.at(changed), cutoff=limit, from_last=True)
        tried.append(changed)
        if _is_done(outcome) and outcome.objective < limit:
            best, values, in_vain = outcome, changed, 0
    return best


def _is_done(node: Outcome) -> bool:
    return node.status == "optimal"
