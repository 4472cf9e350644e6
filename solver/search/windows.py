"""A better solution near the best one known: a few ops at a time may choose anew, all others stay as they are.

Large neighbourhood search (Shaw 1998). The ops of a window, a run of them in the graph's order, keep all their
choices, each other op the one that it has made: what is left is small, and HiGHS solves it in about a second. Windows
of a quarter of the ops overlap by half and go round and round, first with the counts of recomputed blocks as they are,
which is faster, then with the counts open too; a round that finds nothing ends it. That says nothing of how good the
solution is: it is for searches that a limit of time has ended, or is about to.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.linear.outcome import Bounds, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array
from autopar.solver.search.choices import Choices
from autopar.solver.search.shrunk import held_of, without_zeros

SHARE = 1 / 6  # of a search's limit of time: how long a better solution is looked for
_PART = 4  # of the ops, a window of them in a program that is not large
_VARIABLES = 10_000  # about as many as a window of a large one may leave
_SECONDS = 60.0  # for what follows from choices and counts, which takes none
_TURNS = 4  # of all seconds a window may take one in so many


def improved(program: Program, solver: str, gap: float, best: Outcome, seconds: float) -> Outcome:
    """A solution at most as dear as `best`, in about so many seconds; its status and bound are those of `best`."""
    matrix, end = program.matrix(), cpu_seconds() + seconds
    choices = Choices(matrix)
    counts = [count for pair in program.counts for count in pair]
    size = max(1, int(choices.groups * min(1 / _PART, _VARIABLES / len(program.names))))
    starts = range(0, choices.groups, max(1, size // 2))
    for are_fixed in (True, False) if counts else (False,):
        in_vain = 0
        for first in itertools.cycle(starts):
            left = end - cpu_seconds()
            if left <= 0 or in_vain == len(starts):
                break
            bounds: Bounds = {v: (round(best.values[v]),) * 2 for v in counts} if are_fixed else {}
            window = (np.arange(choices.groups) - first) % choices.groups < size
            kept = _around(program, choices, best, window, bounds)
            cutoff = best.objective - gap * abs(best.objective)
            turn = min(left, seconds / _TURNS)
            # HiGHS's aggregator looks at no clock, and took a minute of ALBERT's windows: few rows of many columns each
            found = program.integrate(solver, kept, turn, gap, bounds, cutoff=cutoff, aggregates=False)
            in_vain += 1
            if len(found.values) and found.objective < cutoff:
                best, in_vain = replace(best, values=found.values, objective=found.objective), 0
    return best


def completed(program: Program, solver: str, values: Array, counts: Bounds) -> Outcome | None:
    """The solution with these values of choices and these counts; None where there is none."""
    choices = Choices(program.matrix())
    known = Outcome("feasible", values, math.inf, 0.0)
    kept = _around(program, choices, known, np.zeros(choices.groups, dtype=bool), counts)
    found = program.integrate(solver, kept, _SECONDS, 0.0, counts)
    return replace(found, counts={}) if len(found.values) else None


def _around(program: Program, choices: Choices, best: Outcome, window: Array, bounds: Bounds) -> Array:
    """The variables that are left where the ops outside a window keep their choices."""
    matrix = program.matrix()
    matrix.bound(bounds)
    held = held_of(program)
    kept = np.ones(matrix.columns, dtype=bool)
    kept[choices.columns] = window[choices.owner] | (best.values[choices.columns] > 1 / 2)
    return np.flatnonzero(matrix.with_company(without_zeros(matrix, kept | held, held)))
