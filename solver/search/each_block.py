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
_FOLDED_RELAXATION_GAP = 1e-3  # relative; the folded relaxation, which only says what to mix, may stop this early

Strategies = Mapping[fx.Node, Sequence[Strategy]]


def refined(request: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
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
        model = Model(request.each_block(strategies, levels))
        Rows(model, request.usable_bytes)
        return model

    clock, solver = Clock(seconds, seconds), request.solver
    best, tried = solution, [solution]  # with other storages, the folded plan may beat the faster one
    relaxed = folded.program.relax(solver, seconds, {}, seconds / 2, close=_FOLDED_RELAXATION_GAP)
    if relaxed.status == "optimal":
        model = within(_mixed(request, folded, relaxed, solution))
        best = _faster_of(
            model, _of_differing_blocks(model, solution, solver, clock, request.gap), solution, request.gap
        )
        if _storages(request, best) != _storages(request, solution):
            tried.append(best)
    for plan in tried:
        if (remaining := clock.remaining(True)) <= 0:
            break
        model = within(_storages(request, plan))
        price(model)
        everything = np.arange(len(model.program.names))
        best = _faster_of(
            model,
            _quick_solution(model, everything, best, solver, remaining, request.gap, _STORAGE_NODES),
            best,
            request.gap,
        )
    return best


def differing(request: SolveRequest, folded: Model, solution: Solution, seconds: float) -> Solution:
    """As `refined`, but without a budget, for a problem in which nothing recomputes."""
    if max(stage.count for stage in folded.problem.stages) == 1 or seconds <= 0:
        return solution
    relaxed = folded.program.root(request.solver, seconds, seconds / 2, close=_FOLDED_RELAXATION_GAP)
    if relaxed.status != "optimal" or relaxed.objective >= in_program(folded, solution.seconds * (1 - request.gap)):
        return solution
    model, clock = Model(request.each_block(_mixed(request, folded, relaxed, solution), None)), Clock(seconds, seconds)
    return _faster_of(
        model, _of_differing_blocks(model, solution, request.solver, clock, request.gap), solution, request.gap
    )


def _storages(request: SolveRequest, solution: Solution) -> Strategies:
    """The choices of a solution, and all choices of parameters."""
    return {
        node: strategies
        if request.memory.is_parameter(node) or node not in solution.chosen
        else (solution.chosen[node],)
        for node, strategies in request.restricted.strategies.items()
    }


def _mixed(request: SolveRequest, folded: Model, relaxed: Outcome, solution: Solution) -> Strategies:
    """The choices of nonzero value in a relaxation of the folded problem, and those of its solution."""
    problem = folded.problem
    used = [
        [c.strategy for v, c in zip(variables, op.choices, strict=True) if relaxed.values[v] > INTEGRALITY]
        for op, variables in zip(problem.ops, folded.x, strict=True)
    ]
    choices: dict[fx.Node, Sequence[Strategy]] = {}
    for node, strategies in request.restricted.strategies.items():
        mine = used[problem.op_of[node]] if node in problem.op_of else []
        chosen = solution.chosen.get(node)
        choices[node] = [strategy for strategy in strategies if strategy in mine or strategy == chosen] or strategies
    return choices


def _of_differing_blocks(model: Model, solution: Solution, solver: str, clock: Clock, gap: float) -> Outcome:
    """A good solution, found quickly, of the choices that the model's relaxation or `solution` makes, if it is faster
    than `solution` by more than the gap."""
    price(model)
    program = model.program
    remaining = clock.remaining(True) / 2  # the other half is for the storages
    relaxed = program.relax(solver, remaining, {}, remaining / 2)
    if relaxed.status != "optimal":
        return relaxed
    kept = np.ones(len(program.names), dtype=bool)
    for op, variables in zip(model.problem.ops, model.x, strict=True):
        for variable, choice in zip(variables, op.choices, strict=True):
            kept[variable] = relaxed.values[variable] > INTEGRALITY or choice.strategy == solution.chosen[op.node]
    return _quick_solution(model, np.flatnonzero(kept), solution, solver, remaining, gap, _MIXED_NODES)


def _quick_solution(
    model: Model, kept: Array, solution: Solution, solver: str, seconds: float, gap: float, nodes: int
) -> Outcome:
    """A good solution of some of a priced model's variables (`kept`), if it beats `solution` by more than the gap.

    HiGHS's own heuristics find it within a few nodes. Equal blocks that decide for themselves have many plans of equal
    cost (symmetry), so a search that proves that none is faster takes many times as long.
    """
    cutoff = in_program(model, solution.seconds * (1 - gap))
    outcome = model.program.integrate(solver, kept, seconds, gap, {}, cutoff=cutoff, nodes=nodes, heuristics=True)
    return in_seconds(model, outcome)


def _faster_of(model: Model, outcome: Outcome, solution: Solution, gap: float) -> Solution:
    """The plan of an outcome if it is faster than `solution` by more than the gap; else `solution`."""
    if not len(outcome.values) or outcome.objective >= solution.seconds * (1 - gap):
        return solution
    faster = read_solution(model, outcome)
    return replace(
        solution,
        chosen=faster.chosen,
        parameters=faster.parameters,
        segments=faster.segments,
        seconds=faster.seconds,
        bound=min(solution.bound, faster.seconds),
    )
