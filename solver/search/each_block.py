"""What blocks that share their decisions do decided once more, for each of a few blocks on its own.

Blocks that share their decisions fill a budget in steps: what one block changes, all do. With few blocks such a step is
large. So the problem is stated again without folding, with few ways to run each op, so that it is small, and the level
at which each block recomputes left open. The plan of before is one of its plans. That is done twice:

- with the ways that the relaxation of the folded problem mixes. Where a budget binds, a relaxation does part of the
  work in a way that is fast and part in one that takes little memory; blocks on their own can do so in whole numbers,
  some one way and some the other. Which ones, the relaxation of the problem stated again says (relaxation enforced
  neighbourhood search: Berthold 2014): it is not alike for all blocks, and what it leaves out is left out;
- with the ways of a plan alone, that of before or the one found so, and all storages of parameters.

Without a budget the first of these is made alone, for any number of blocks: what is left is small, and a relaxation
that is no dearer than the plan says at once that blocks have no reason to differ. They have one where a block is too
small to do by itself what pays: of layers of one product each, one splits its columns and the next its rows, so that
only every second one is followed by a collective (1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import WHOLE, Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.request import SolveRequest
from autopar.solver.seconds.objective import in_program, in_seconds, price
from autopar.solver.solution import Solution, read_solution
from autopar.strategies.strategy import Strategy

MOST_BLOCKS = 8
"""Of one kind that are few: with more, one block is a small part of a step, and rows of all take longer."""

_MIXED, _STORED = 20, 100  # nodes of HiGHS's search, among ways and storages, whose end so has no need of the clock
_CLOSE = 1e-3  # what a relaxation may miss of its optimum, relatively

Ways = Mapping[fx.Node, Sequence[Strategy]]


def refined(asked: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
    """A solution of a folded problem, or one in which blocks differ, where that is faster by more than the gap.

    Its status and bound are those of the folded problem: of plans whose blocks share their decisions.
    """
    stages = folded.problem.stages
    if not 1 < max(stage.count for stage in stages) <= MOST_BLOCKS or seconds <= 0:
        return solution
    levels = {
        (stage.repeat, stage.first + i): stage.levels
        for stage in stages
        if stage.repeat is not None
        for i in range(stage.count)
    }

    def within(ways: Ways) -> Model:
        model = Model(asked.each_block(ways, levels))
        Rows(model, asked.usable_bytes)
        return model

    clock, solver = Clock(seconds, seconds), asked.solver
    best, tried = solution, [solution]  # storages around the plan of before may be better than around a faster one
    relaxed = folded.program.relax(solver, seconds, {}, seconds / 2, close=_CLOSE)
    if relaxed.status == "optimal":
        model = within(_mixed(asked, folded, relaxed, solution))
        best = _faster(model, _told_apart(model, solution, solver, clock, asked.gap), solution, asked.gap)
        if _storages(asked, best) != _storages(asked, solution):
            tried.append(best)
    for one in tried:
        if (left := clock.left(True)) <= 0:
            break
        model = within(_storages(asked, one))
        price(model)
        everything = np.arange(len(model.program.names))
        best = _faster(model, _found(model, everything, best, solver, left, asked.gap, _STORED), best, asked.gap)
    return best


def differing(asked: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
    """The same without a budget, of a problem in which nothing recomputes."""
    if max(stage.count for stage in folded.problem.stages) == 1 or seconds <= 0:
        return solution
    relaxed = folded.program.root(asked.solver, seconds, seconds / 2, close=_CLOSE)
    if relaxed.status != "optimal" or relaxed.objective >= in_program(folded, solution.seconds * (1 - asked.gap)):
        return solution
    model, clock = Model(asked.each_block(_mixed(asked, folded, relaxed, solution), None)), Clock(seconds, seconds)
    return _faster(model, _told_apart(model, solution, asked.solver, clock, asked.gap), solution, asked.gap)


def _storages(asked: SolveRequest, solution: Solution) -> Ways:
    """The ways of a solution, and all storages of parameters."""
    return {
        node: some if asked.memory.is_parameter(node) or node not in solution.chosen else (solution.chosen[node],)
        for node, some in asked.restricted.strategies.items()
    }


def _mixed(asked: SolveRequest, folded: Model, relaxed: Outcome, solution: Solution) -> Ways:
    """The ways that a relaxation of the folded problem mixes, and those of its solution."""
    problem = folded.problem
    used = [
        [c.strategy for v, c in zip(variables, op.choices, strict=True) if relaxed.values[v] > WHOLE]
        for op, variables in zip(problem.ops, folded.x, strict=True)
    ]
    found: dict[fx.Node, Sequence[Strategy]] = {}
    for node, some in asked.restricted.strategies.items():
        mine = used[problem.op_of[node]] if node in problem.op_of else []
        chosen = solution.chosen.get(node)
        found[node] = [one for one in some if one in mine or one == chosen] or some
    return found


def _told_apart(model: Model, solution: Solution, solver: str, clock: Clock, gap: float) -> Outcome:
    """The best solution, soon, in which ops run in the ways that the model's relaxation uses, or a solution does, if
    it is faster by more than the gap."""
    price(model)
    program = model.program
    left = clock.left(True) / 2  # so that storages have the other half
    relaxed = program.relax(solver, left, {}, left / 2)
    if relaxed.status != "optimal":
        return relaxed
    kept = np.ones(len(program.names), dtype=bool)
    for op, variables in zip(model.problem.ops, model.x, strict=True):
        for variable, choice in zip(variables, op.choices, strict=True):
            kept[variable] = relaxed.values[variable] > WHOLE or choice.strategy == solution.chosen[op.node]
    return _found(model, np.flatnonzero(kept), solution, solver, left, gap, _MIXED)


def _found(
    model: Model, kept: Array, solution: Solution, solver: str, seconds: float, gap: float, nodes: int
) -> Outcome:
    """The best solution with some of a priced model's variables, soon, if it is faster than one by more than the gap.

    HiGHS's own heuristics find it: blocks that decide for themselves, but are equal, have many plans of equal cost, so
    that a search which proves that none is faster takes many times as long.
    """
    cutoff = in_program(model, solution.seconds * (1 - gap))
    found = model.program.integrate(solver, kept, seconds, gap, {}, cutoff=cutoff, nodes=nodes, heuristics=True)
    return in_seconds(model, found)


def _faster(model: Model, outcome: Outcome, solution: Solution, gap: float) -> Solution:
    """What an outcome stands for, if that is faster by more than the gap; else the solution."""
    if not len(outcome.values) or outcome.objective >= solution.seconds * (1 - gap):
        return solution
    found = read_solution(model, outcome)
    return replace(
        solution,
        chosen=found.chosen,
        parameters=found.parameters,
        segments=found.segments,
        seconds=found.seconds,
        bound=min(solution.bound, found.seconds),
    )
