"""Large neighbourhood search (Shaw 1998): a few ops at a time may choose anew, all others keep their choices.

A window is a run of ops in the graph's order. The ops of the window are free, every other op is fixed to its choice in
the best solution known; the program that is left is small, and HiGHS solves it in about a second. Windows of a quarter
of the ops, each overlapping the last by half, go round until a whole round finds nothing: first with the counts of
recomputed blocks fixed, which is faster, then with open counts. This gives no bound, so it is for searches that the
time limit has ended or is about to end.
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
from autopar.solver.search.shrunk import required_of, without_zeros

NEIGHBOURHOOD_SHARE = 1 / 6  # share of a search's time limit that the neighbourhood search may take
_WINDOW_SHARE = 1 / 4  # a window has at most this share of the ops: a wider one improves more, and takes longer
_WINDOW_VARIABLES = 10_000  # in a large program a window has fewer ops: such that about so many variables are left
_COMPLETION_SECONDS = 60.0  # limit for completing a solution of fixed choices and counts, which takes almost no time
_TURN_SHARE = 1 / 4  # a window may take at most this share of the seconds, so that some others get their turn


def improved(program: Program, solver: str, gap: float, best: Outcome, seconds: float) -> Outcome:
    """A solution that costs at most as much as `best`, after about so many seconds; its status and bound are those of
    `best`."""
    matrix, end = program.matrix(), cpu_seconds() + seconds
    choices = Choices(matrix)
    counts = [count for pair in program.records.counts for count in pair]
    size = max(1, int(choices.groups * min(_WINDOW_SHARE, _WINDOW_VARIABLES / len(program.names))))
    starts = range(0, choices.groups, max(1, size // 2))
    for are_fixed in (True, False) if counts else (False,):
        in_vain = 0
        for first in itertools.cycle(starts):
            remaining = end - cpu_seconds()
            if remaining <= 0 or in_vain == len(starts):
                break
            bounds: Bounds = {v: (round(best.values[v]),) * 2 for v in counts} if are_fixed else {}
            window = (np.arange(choices.groups) - first) % choices.groups < size
            kept = _around(program, choices, best, window, bounds)
            cutoff = best.objective - gap * abs(best.objective)
            turn = min(remaining, _TURN_SHARE * seconds)
            # HiGHS's aggregator ignores the time limit: it took a minute on ALBERT's windows (few rows, many columns)
            outcome = program.integrate(solver, kept, turn, gap, bounds, cutoff=cutoff, aggregates=False)
            in_vain += 1
            if len(outcome.values) and outcome.objective < cutoff:
                best, in_vain = replace(best, values=outcome.values, objective=outcome.objective), 0
    return best


def completed(program: Program, solver: str, values: Array, counts: Bounds) -> Outcome | None:
    """The solution with these values of the choices and these counts; None if there is none."""
    choices = Choices(program.matrix())
    solution = Outcome("feasible", values, math.inf, 0.0)
    kept = _around(program, choices, solution, np.zeros(choices.groups, dtype=bool), counts)
    outcome = program.integrate(solver, kept, _COMPLETION_SECONDS, 0.0, counts)
    return replace(outcome, counts={}) if len(outcome.values) else None


def _around(program: Program, choices: Choices, best: Outcome, window: Array, bounds: Bounds) -> Array:
    """The variables that can be nonzero if the ops outside a window keep their choices."""
    matrix = program.matrix()
    matrix.bound(bounds)
    required = required_of(program)
    kept = np.ones(matrix.columns, dtype=bool)
    kept[choices.columns] = window[choices.owner] | (best.values[choices.columns] > 1 / 2)
    return np.flatnonzero(matrix.with_dependents(without_zeros(matrix, kept | required, required)))
