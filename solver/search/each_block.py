"""Refining the plan of a folded problem: equal blocks, which share their decisions there, decide for themselves.

Blocks that share their decisions fill a budget in large steps, since a change of one block is a change of all; the
fewer the blocks, the larger the step. So the problem is stated again without folding, with few choices for each op, so
that it is small, and with the recompute level of each block left open. The folded plan is one of its plans. Two sets of
choices are tried:

- the choices that the relaxation of the folded problem mixes. If a budget binds, a relaxation does part of the work by
  a fast choice and part by a choice that takes little memory. With blocks on their own, an integer solution can do the
  same: some blocks make the one choice, some the other. The relaxation of the unfolded problem says which, as
  it differs between blocks: choices that are 0 in it are left out (relaxation enforced neighbourhood search:
  Berthold 2014);
- only the choices of one plan (the folded plan, or the one just found), and all choices of how parameters are stored.

Without a budget only the first set is tried, for any number of blocks. The program is small then, and if the relaxation
of the folded problem costs no less than the plan, blocks have no reason to differ. They have one if a single block is
too small a unit: with layers of one matrix product each, one layer splits its columns and the next its rows, so that
only every second layer needs a collective (1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from autopar.solver.linear.clock import Clock
from autopar.solver.linear.outcome import INTEGRALITY, Outcome
from autopar.solver.linear.terms import Array
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.request import SolveRequest
from autopar.solver.seconds.objective import in_program, in_seconds, price
from autopar.solver.solution import Solution, read_solution
from autopar.strategies.strategy import Strategy

MOST_BLOCKS = 8
"""Largest number of equal blocks that are refined under a budget: with more, one block is a small part of a step, and
the memory rows of all blocks take longer."""

_MIXED_NODES, _STORAGE_NODES = 20, 100  # HiGHS nodes for mixed choices and for storages: no limits by the clock
_FOLDED_RELAXATION_GAP = 1e-3  # the folded relaxation may stop this far below its optimum (relative)

Strategies = Mapping[fx.Node, Sequence[Strategy]]


def refined(asked: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
    """The solution of a folded problem, or one in which blocks differ, if that is faster by more than the gap.

    Its status and bound are those of the folded problem, that is, for plans whose blocks share their decisions.
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

    def within(strategies: Strategies) -> Model:
        model = Model(asked.each_block(strategies, levels))
        Rows(model, asked.usable_bytes)
        return model

    clock, solver = Clock(seconds, seconds), asked.solver
    best, tried = solution, [solution]  # with other storages, the folded plan may beat the faster one
    relaxed = folded.program.relax(solver, seconds, {}, seconds / 2, close=_FOLDED_RELAXATION_GAP)
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
        best = _faster(model, _found(model, everything, best, solver, left, asked.gap, _STORAGE_NODES), best, asked.gap)
    return best


def differing(asked: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
    """As `refined`, but without a budget, for a problem in which nothing recomputes."""
    if max(stage.count for stage in folded.problem.stages) == 1 or seconds <= 0:
        return solution
    relaxed = folded.program.root(asked.solver, seconds, seconds / 2, close=_FOLDED_RELAXATION_GAP)
    if relaxed.status != "optimal" or relaxed.objective >= in_program(folded, solution.seconds * (1 - asked.gap)):
        return solution
    model, clock = Model(asked.each_block(_mixed(asked, folded, relaxed, solution), None)), Clock(seconds, seconds)
    return _faster(model, _told_apart(model, solution, asked.solver, clock, asked.gap), solution, asked.gap)


def _storages(asked: SolveRequest, solution: Solution) -> Strategies:
    """The choices of a solution, and all choices of parameters."""
    return {
        node: some if asked.memory.is_parameter(node) or node not in solution.chosen else (solution.chosen[node],)
        for node, some in asked.restricted.strategies.items()
    }


def _mixed(asked: SolveRequest, folded: Model, relaxed: Outcome, solution: Solution) -> Strategies:
    """The choices of nonzero value in a relaxation of the folded problem, and those of its solution."""
    problem = folded.problem
    used = [
        [c.strategy for v, c in zip(variables, op.choices, strict=True) if relaxed.values[v] > INTEGRALITY]
        for op, variables in zip(problem.ops, folded.x, strict=True)
    ]
    found: dict[fx.Node, Sequence[Strategy]] = {}
    for node, some in asked.restricted.strategies.items():
        mine = used[problem.op_of[node]] if node in problem.op_of else []
        chosen = solution.chosen.get(node)
        found[node] = [one for one in some if one in mine or one == chosen] or some
    return found


def _told_apart(model: Model, solution: Solution, solver: str, clock: Clock, gap: float) -> Outcome:
    """A good solution, found quickly, of the choices that the model's relaxation or `solution` makes, if it is faster
    than `solution` by more than the gap."""
    price(model)
    program = model.program
    left = clock.left(True) / 2  # the other half is for the storages
    relaxed = program.relax(solver, left, {}, left / 2)
    if relaxed.status != "optimal":
        return relaxed
    kept = np.ones(len(program.names), dtype=bool)
    for op, variables in zip(model.problem.ops, model.x, strict=True):
        for variable, choice in zip(variables, op.choices, strict=True):
            kept[variable] = relaxed.values[variable] > INTEGRALITY or choice.strategy == solution.chosen[op.node]
    return _found(model, np.flatnonzero(kept), solution, solver, left, gap, _MIXED_NODES)


def _found(
    model: Model, kept: Array, solution: Solution, solver: str, seconds: float, gap: float, nodes: int
) -> Outcome:
    """A good solution of some of a priced model's variables (`kept`), if it beats `solution` by more than the gap.

    HiGHS's own heuristics find it within a few nodes. Equal blocks that decide for themselves have many plans of equal
    cost (symmetry), so a search that proves that none is faster takes many times as long.
    """
    cutoff = in_program(model, solution.seconds * (1 - gap))
    found = model.program.integrate(solver, kept, seconds, gap, {}, cutoff=cutoff, nodes=nodes, heuristics=True)
    return in_seconds(model, found)


def _faster(model: Model, outcome: Outcome, solution: Solution, gap: float) -> Solution:
    """The plan of an outcome if it is faster than `solution` by more than the gap; else `solution`."""
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
