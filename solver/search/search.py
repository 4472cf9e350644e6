"""The best solution of a program: reduced-cost fixing, then branch and bound over the counts of what is left.

A solution in which a variable of reduced cost d is 1 costs at least L + d, where L is the optimum of a relaxation. So
branch and bound (`solver.search.branching`) runs in a part of the program: the variables that solutions up to a cost
limit can use (`solver.search.shrunk`). Relaxations of this part take a tenth of the time. If the solution found costs
more than the limit, the search is repeated with a higher limit.

The relaxation of the whole program, which gives the reduced costs, is solved once, and not to optimality. The memory
rows take most of its time. So a large program is first relaxed without its budget, which takes a tenth of the time and
gives a bound that is lower by what the budget costs. If solutions a little above this bound use only a small part of
the program, and the relaxation of this part with the budget shows that the best solution is among them, only this part
is searched.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from autopar.errors import TimeLimitError
from autopar.solver.linear.clock import Clock
from autopar.solver.linear.engines import is_highs
from autopar.solver.linear.highs import Basis
from autopar.solver.linear.outcome import NONE, Outcome
from autopar.solver.linear.program import Program
from autopar.solver.linear.terms import Array
from autopar.solver.search import incumbent
from autopar.solver.search.branching import Branching
from autopar.solver.search.shrunk import Shrunk, part_of, within

_ROOT_GAP = 4e-3  # relative; the root relaxation may stop this far below its optimum: sooner, with a weaker bound
_PART_MARGINS = 1e-2, 4e-2, math.inf  # successive cost limits of the parts searched, relative above the relaxation
_NEAR_PART_SHARE = 0.4  # of the time left, for one part of solutions near the relaxation, if only a far one is known
_EPSILON = 1e-9  # relative error allowed for floating point
_MAX_COLUMNS_WHOLE = 100_000  # a program without counts that has at most so many columns is searched whole
_MAX_PART_SHARE = 0.5  # a part with more than this share of all columns is not worth a relaxation of its own
_FIRST_BUDGET_MARGIN = 7e-2  # first guess of what the budget costs, relative above the relaxation without it
_NEXT_BUDGET_MARGIN = 2e-2  # the next limit, above the relaxation of a part with the budget (relative)
_MAX_CHOICES_SHARE = 0.75, 0.85  # of a part worth a relaxation of its own: the first part, later parts
_PATIENCE_FACTOR, _MIN_PATIENCE = 4.0, 60.0  # the first solution may take 4 times the limit, and at least 60 seconds


def search(
    program: Program,
    solver: str = "highs",
    *,
    time_limit: float = 60.0,
    gap: float = 1e-4,
    patience: float | None = None,
    best: Outcome | None = None,
    first: Array | None = None,
) -> Outcome:
    """Solve on one thread to relative `gap` or until `time_limit` seconds, in CPU time (`solver.linear.clock`).

    The same program gives the same answer, unless the limit is reached.

    If the limit passes before there is a solution, the first one found ends the search. `best`: a known solution;
    `first`: flows that good solutions use, the first columns of the relaxation.

    Raises TimeLimitError when `patience` seconds (four times the limit, and at least a minute) bring none.
    """
    patience = patience_of(time_limit) if patience is None else patience
    clock = Clock(time_limit, patience)
    outcome = _near_no_budget(program, solver, gap, clock) if first is None else None
    if outcome is not None:
        return outcome
    remaining, close = (
        patience - clock.elapsed if best is None else clock.remaining(True),
        _ROOT_GAP if program.has_counts else None,
    )
    root = program.root(solver, remaining, time_limit / 2, close=close, first=first)
    if best is not None and root.status in ("stopped", "infeasible"):  # infeasible by HiGHS's tolerance alone
        return replace(best, status="feasible", bound=-math.inf)
    if root.status == "stopped":
        raise clock.too_short()
    if root.status == "infeasible" or not any(program.integer):
        return root
    if not program.has_counts and len(program.names) <= _MAX_COLUMNS_WHOLE:
        return Branching(program, solver, gap, clock, best).run(root)
    return _by_parts(program, root, solver, gap, clock, best)


def patience_of(time_limit: float) -> float:
    """How many seconds the search for a first solution may take."""
    return max(_PATIENCE_FACTOR * time_limit, _MIN_PATIENCE)


def _near_no_budget(program: Program, solver: str, gap: float, clock: Clock) -> Outcome | None:
    """The best solution of a large program with a budget, if the budget costs little; else None."""
    budget = program.budget
    is_small = len(program.names) <= incumbent.MAX_SMALL_PROGRAM
    if budget is None or not program.has_counts or is_small or not is_highs(solver):
        return None
    free = {budget: (program.lower[budget], math.inf)}
    rough = program.relax(solver, clock.patience - clock.elapsed, free, clock.limit / 2, close=math.inf)
    if rough.status != "optimal":
        return None
    choices, basis = program.matrix().integer, None
    limit = rough.objective + _FIRST_BUDGET_MARGIN * abs(rough.objective)
    for most in itertools.chain(_MAX_CHOICES_SHARE, itertools.repeat(_MAX_CHOICES_SHARE[-1])):
        kept = within(program, rough, limit)
        if choices[kept].sum() > most * choices.sum():
            return None
        part = part_of(program, kept)
        root = _rooted(part, basis, solver, clock.patience - clock.elapsed, clock, close=_ROOT_GAP)
        if root.status != "optimal" or root.basis is None:
            return None
        basis = part.of_whole(root.basis)
        if root.objective + _PART_MARGINS[0] * abs(root.objective) <= limit:
            break
        limit = max(limit, root.objective + _NEXT_BUDGET_MARGIN * abs(root.objective))
    outcome = _by_parts(part.program, root, solver, gap, clock)
    if not len(outcome.values) or outcome.objective > limit:
        return None
    return _judged(_of_whole(program, kept, outcome, limit), gap)


def _by_parts(
    program: Program, root: Outcome, solver: str, gap: float, clock: Clock, best: Outcome | None = None
) -> Outcome:
    """Search the part of the program that solutions up to a limit can use; raise the limit if the solution is above it.

    If the `best` known solution is far above the relaxation, most variables can be part of a better one. So parts near
    the relaxation are searched first, each for a share of the time.
    """
    given_best, highest = best, math.inf if best is None else best.objective * (1 + _EPSILON)
    near = [root.objective + margin * abs(root.objective) for margin in _PART_MARGINS]
    limit = least = -math.inf
    while True:
        limit = min((candidate for candidate in near if limit < candidate < highest), default=highest)
        kept, is_near = within(program, root, limit), best is not None and limit < highest
        if len(kept) > max(incumbent.MAX_SMALL_PROGRAM, _MAX_PART_SHARE * len(program.names)):
            return _judged(Branching(program, solver, gap, clock, best).run(root), gap, least)
        part = part_of(program, kept)
        start, own = best, clock
        if is_near:
            own = Clock(*[_NEAR_PART_SHARE * clock.remaining(True)] * 2)
            if best is given_best or not _contains(part, best):  # with a far one, boxes are cut before HiGHS tries them
                start = None
        try:
            outcome = _of_part(part, root.basis, start, solver, gap, own, limit)
        except TimeLimitError:
            if not is_near:
                raise
            outcome = Outcome("stopped", NONE, math.inf, -math.inf)
        least = max(least, min(outcome.bound, limit))
        if len(outcome.values) and (best is None or not is_near or outcome.objective < best.objective):
            near = [] if best is None else near
            best = _of_whole(program, kept, outcome, limit)
            judged = _judged(best, gap, least)
            if judged.status == "optimal" or (limit >= best.objective and not is_near) or clock.remaining(True) <= 0:
                return judged
            highest = best.objective * (1 + _EPSILON)
        elif limit == math.inf:
            return outcome


def _contains(part: Shrunk, solution: Outcome | None) -> bool:
    """Whether a part contains a solution of its program."""
    return solution is not None and bool(np.isin(np.flatnonzero(solution.values), part.columns).all())


def _of_whole(program: Program, kept: Array, solution: Outcome, limit: float) -> Outcome:
    """A solution of a part as one of the program; its bound is at most the limit, up to which the part is complete."""
    values = np.zeros(len(program.names))
    values[kept] = solution.values
    return replace(solution, values=values, bound=min(solution.bound, limit))


def _judged(outcome: Outcome, gap: float, least: float = -math.inf) -> Outcome:
    """A solution with the better of its bound and another one, `least`, and the status that follows."""
    if not len(outcome.values):
        return outcome
    outcome = replace(outcome, bound=min(max(outcome.bound, least), outcome.objective))
    near = outcome.bound >= outcome.objective - gap * abs(outcome.objective)
    return replace(outcome, status="optimal" if near else "feasible")


def _of_part(
    part: Shrunk,
    basis: Basis | None,
    best: Outcome | None,
    solver: str,
    gap: float,
    clock: Clock,
    limit: float,
) -> Outcome:
    """The best solution of a part of a program, if it is within the limit. The part contains the solution `best` of the
    whole program, if that is given; `basis`: of the whole program's relaxation."""
    start = None if best is None else replace(best, values=best.values[part.columns])
    if start is not None and clock.remaining(True) <= 0:
        return replace(start, status="feasible")
    # A first solution may use all patience.
    remaining = clock.patience - clock.elapsed if start is None else clock.remaining(True)
    root = _rooted(part, basis, solver, remaining, clock)
    if root.status == "optimal":
        return Branching(part.program, solver, gap, clock, start, limit).run(root)
    if start is not None:  # nothing better is in this part, or it takes too long to tell
        return replace(start, status="feasible", bound=math.inf if root.status == "infeasible" else start.bound)
    if root.status == "stopped":
        raise clock.too_short()
    return root


def _rooted(
    part: Shrunk, basis: Basis | None, solver: str, seconds: float, clock: Clock, close: float | None = None
) -> Outcome:
    """The relaxation of a part, started from a basis of the whole program if given, in at most these `seconds`."""
    program, start = part.program, None if basis is None else part.basis(basis)
    everything = len(program.names) <= incumbent.MAX_SMALL_PROGRAM and close is None
    return program.relax(solver, seconds, {}, clock.limit / 2, everything=everything, close=close, basis=start)
