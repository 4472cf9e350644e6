"""Storage of parameters and recompute decided once more, for each of a few blocks on its own.

Blocks that share their decisions fill a budget in steps: what one block changes, all do. With few blocks such a step is
large. So the problem is stated again without folding, every op with the one strategy that it has already; how
parameters are stored, and at which level each block recomputes, is left open. With so little to choose it is solved in
tenths of seconds, and the plan of before is one of its plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cost.blocks import Repeat
from autopar.cost.memory import StepMemory
from autopar.errors import AutoparError
from autopar.solver.building import build_problem
from autopar.solver.constraints import Restricted
from autopar.solver.model import Model
from autopar.solver.problem import Problem
from autopar.solver.rows import Rows
from autopar.solver.running import run
from autopar.solver.solution import Solution, read_solution

MOST_BLOCKS = 8
"""Of one kind that are few: with more, one block is a small part of a step, and rows of all take longer."""


def refined(
    problem: Problem,
    solution: Solution,
    memory: StepMemory,
    restricted: Restricted,
    cluster: Cluster,
    repeats: Sequence[Repeat],
    budget_bytes: float,
    time_limit: float,
    gap: float,
    solver: str,
) -> Solution:
    """A solution of a folded problem, or one in which blocks differ, where that is faster by more than the gap.

    Its status and bound are those of the folded problem: of plans whose blocks share their decisions.
    """
    counts = [stage.count for stage in problem.stages]
    if not 1 < max(counts) <= MOST_BLOCKS or time_limit <= 0:
        return solution
    strategies = {
        node: some if memory.is_parameter(node) or node not in solution.chosen else (solution.chosen[node],)
        for node, some in restricted.strategies.items()
    }
    again = replace(restricted, strategies=strategies)
    levels = {
        (stage.repeat, stage.first + i): stage.levels
        for stage in problem.stages
        if stage.repeat is not None
        for i in range(stage.count)
    }
    model = Model(build_problem(memory, again, cluster, repeats, fold=False, levels=levels))
    Rows(model, budget_bytes)
    try:
        outcome = run(model, solver, time_limit, gap, patience=time_limit)
    except AutoparError:  # none found in time
        return solution
    if outcome.status == "infeasible" or outcome.objective >= solution.seconds * (1 - gap):
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
