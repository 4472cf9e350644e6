"""The best solution of a program: in the part of it that good solutions can use, by branch and bound over its counts.

A solution in which a variable of reduced cost d is 1 costs at least L + d, where L is the optimum of a relaxation. So
the search (`solver.search.branching`) is made in the part of the program that solutions up to a limit can use
(`solver.search.shrunk`), whose relaxations take a tenth of the time. What is found is compared with the limit, and
with a higher one the search is repeated if it has to be.

The relaxation of the whole program, which says so, is solved once, and not to its end. Most of its time goes into the
rows of memory. So that of a large program is solved without a budget first: it takes a tenth of the time, and is less
than the optimum by what the budget costs. Where its reduced costs leave a small part of the program to solutions a
little dearer, and the relaxation of this part, with the budget, says that the best is among them, that part is all.
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

_LOOSE = 4e-3  # what the first relaxation may miss of its optimum, relatively
_PARTS = 1e-2, 4e-2, math.inf  # how much more than it the solutions cost that are looked for at first, relatively
_SHARE = 0.4  # of the time: what solutions near the relaxation are looked for, where a far one is known
_EPSILON = 1e-9  # by which floating point may be wrong, relatively
_LARGE = 100_000  # columns: a program without counts that has fewer is searched as it is
_SMALL = 0.5  # of the columns: a part that has more is not worth a relaxation of its own
_COSTS = 7e-2  # what a budget is first thought to cost, relatively
_ABOVE = 2e-2  # how much more than the relaxation of a part its solutions cost, relatively
_MOST = 0.75, 0.85  # of the choices, at first and later: a part that has more is not worth a relaxation of its own
_PATIENCE = 4.0, 60.0  # how long a first solution may take: times the limit, and at least so many seconds


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
    """Solve on one thread to relative `gap` or until `time_limit` seconds (`solver.linear.clock` says whose).

    The same program gives the same answer, unless the limit is reached.

    Where the limit passes before there is any solution, the first one found ends the search. `best`: a solution that is
    known; `first`: flows that good solutions use, with which the relaxation begins.

    Raises TimeLimitError when `patience` seconds (four times the limit, and at least a minute) bring none.
    """
    patience = patience_of(time_limit) if patience is None else patience
    clock = Clock(time_limit, patience)
    found = _near_no_budget(program, solver, gap, clock) if first is None else None
    if found is not None:
        return found
    left, close = patience - clock.gone if best is None else clock.left(True), _LOOSE if program.counts else None
    root = program.root(solver, left, time_limit / 2, close=close, first=first)
    if best is not None and root.status in ("stopped", "infeasible"):  # the latter by HiGHS's tolerance alone
        return replace(best, status="feasible", bound=-math.inf)
    if root.status == "stopped":
        raise clock.too_short()
    if root.status == "infeasible" or not any(program.integer):
        return root
    if not program.counts and len(program.names) <= _LARGE:
        return Branching(program, solver, gap, clock, best).run(root)
    return _by_parts(program, root, solver, gap, clock, best)


def patience_of(time_limit: float) -> float:
    """How many seconds a first solution may take."""
    return max(_PATIENCE[0] * time_limit, _PATIENCE[1])


def _near_no_budget(program: Program, solver: str, gap: float, clock: Clock) -> Outcome | None:
    """The best solution of a large program with a budget, if it is not much dearer than without; else None."""
    budget = program.budget
    if budget is None or not program.counts or len(program.names) <= incumbent.FEW or not is_highs(solver):
        return None
    free = {budget: (program.lower[budget], math.inf)}
    rough = program.relax(solver, clock.patience - clock.gone, free, clock.limit / 2, close=math.inf)
    if rough.status != "optimal":
        return None
    choices, limit, basis = program.matrix().integer, rough.objective + _COSTS * abs(rough.objective), None
    for most in itertools.chain(_MOST, itertools.repeat(_MOST[-1])):
        kept = within(program, rough, limit)
        if choices[kept].sum() > most * choices.sum():
            return None
        part = part_of(program, kept)
        root = _rooted(part, basis, solver, clock.patience - clock.gone, clock, close=_LOOSE)
        if root.status != "optimal" or root.basis is None:
            return None
        basis = part.of_whole(root.basis)
        if root.objective + _PARTS[0] * abs(root.objective) <= limit:
            break
        limit = max(limit, root.objective + _ABOVE * abs(root.objective))
    found = _by_parts(part.program, root, solver, gap, clock)
    if not len(found.values) or found.objective > limit:
        return None
    return _judged(_of_whole(program, kept, found, limit), gap)


def _by_parts(
    program: Program, root: Outcome, solver: str, gap: float, clock: Clock, best: Outcome | None = None
) -> Outcome:
    """With the variables that solutions up to a limit can use, and a higher limit where the best is above it.

    Where the `best` is far from the relaxation, better ones are first looked for near that, for parts of the time: all
    that is better than a far one is most of the program.
    """
    given, highest = best, math.inf if best is None else best.objective * (1 + _EPSILON)
    near = [root.objective + margin * abs(root.objective) for margin in _PARTS]
    limit = least = -math.inf
    while True:
        limit = min((one for one in near if limit < one < highest), default=highest)
        kept, is_near = within(program, root, limit), best is not None and limit < highest
        if len(kept) > max(incumbent.FEW, _SMALL * len(program.names)):
            return _judged(Branching(program, solver, gap, clock, best).run(root), gap, least)
        part = part_of(program, kept)
        known, own = best, clock
        if is_near:
            own = Clock(*[_SHARE * clock.left(True)] * 2)
            if best is given or not _has(part, best):  # with a far one, a part would be cut before HiGHS looks at it
                known = None
        try:
            found = _of_part(part, root.basis, known, solver, gap, own, limit)
        except TimeLimitError:
            if not is_near:
                raise
            found = Outcome("stopped", NONE, math.inf, -math.inf)
        least = max(least, min(found.bound, limit))
        if len(found.values) and (best is None or not is_near or found.objective < best.objective):
            near = [] if best is None else near
            best = _of_whole(program, kept, found, limit)
            judged = _judged(best, gap, least)
            if judged.status == "optimal" or (limit >= best.objective and not is_near) or clock.left(True) <= 0:
                return judged
            highest = best.objective * (1 + _EPSILON)
        elif limit == math.inf:
            return found


def _has(part: Shrunk, found: Outcome | None) -> bool:
    """Whether a part has a solution of its program."""
    return found is not None and bool(np.isin(np.flatnonzero(found.values), part.columns).all())


def _of_whole(program: Program, kept: Array, found: Outcome, limit: float) -> Outcome:
    """A solution of the part that has all solutions up to a limit, as one of the program."""
    values = np.zeros(len(program.names))
    values[kept] = found.values
    return replace(found, values=values, bound=min(found.bound, limit))


def _judged(found: Outcome, gap: float, least: float = -math.inf) -> Outcome:
    """With the status that its bound gives it, and one that is known besides."""
    if not len(found.values):
        return found
    found = replace(found, bound=min(max(found.bound, least), found.objective))
    near = found.bound >= found.objective - gap * abs(found.objective)
    return replace(found, status="optimal" if near else "feasible")


def _of_part(
    part: Shrunk,
    basis: Basis | None,
    best: Outcome | None,
    solver: str,
    gap: float,
    clock: Clock,
    limit: float,
) -> Outcome:
    """The best solution of a part of a program, if it is within the limit; the part has the best known one of the whole
    program. `basis`: of the whole."""
    known = None if best is None else replace(best, values=best.values[part.columns])
    if known is not None and clock.left(True) <= 0:
        return replace(known, status="feasible")
    left = clock.patience - clock.gone if known is None else clock.left(True)  # a first solution may take all patience
    root = _rooted(part, basis, solver, left, clock)
    if root.status == "optimal":
        return Branching(part.program, solver, gap, clock, known, limit).run(root)
    if known is not None:  # nothing better is in this part, or it takes too long to tell
        return replace(known, status="feasible", bound=math.inf if root.status == "infeasible" else known.bound)
    if root.status == "stopped":
        raise clock.too_short()
    return root


def _rooted(
    part: Shrunk, basis: Basis | None, solver: str, left: float, clock: Clock, close: float | None = None
) -> Outcome:
    """The relaxation of a part, from a basis of the whole if there is one, in the seconds that are `left`."""
    program, start = part.program, None if basis is None else part.basis(basis)
    everything = len(program.names) <= incumbent.FEW and close is None
    return program.relax(solver, left, {}, clock.limit / 2, everything=everything, close=close, basis=start)
