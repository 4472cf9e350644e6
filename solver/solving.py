"""Solving one request: first without the budget, then within it, and as a last resort near the plan of least memory.

The program without a budget has neither memory rows nor recompute and is solved many times faster. If its plan fits the
budget, no other plan is faster.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.cost.memory.formulas import StepMemory
from autopar.errors import TimeLimitError
from autopar.layout import Layout
from autopar.sizes import show_bytes_up
from autopar.solver.linear.clock import cpu_seconds
from autopar.solver.problem import Problem
from autopar.solver.refusal import refusal, too_small
from autopar.solver.request import SolveRequest
from autopar.solver.search.each_block import differing, refined
from autopar.solver.search.pruning import Pruner
from autopar.solver.search.smallest import LeastMemory
from autopar.solver.search.under_budget import fastest_near, fastest_within
from autopar.solver.search.windows import NEIGHBOURHOOD_SHARE
from autopar.solver.solution import Predicted, Solution, predicted, read_solution


class Watch:
    """CPU seconds of the stages of planning."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def solve(asked: SolveRequest, watch: Watch) -> tuple[Problem, Solution, Predicted]:
    """The fastest plan of a request, with its problem and predicted cost. If unsharded parameters fit, it is first
    looked for without budget and recompute: if that plan fits, none is faster."""
    end, free, pruner = cpu_seconds() + asked.time_limit, 0.0, Pruner(asked.solver, asked.gap)
    if _replicated_bytes(asked.memory) <= asked.budget_bytes and not asked.restricted.forces_replays:
        problem = asked.problem(recompute=False)
        watch.lap("build")
        model, outcome = pruner.free(problem, asked.time_limit)
        watch.lap("ilp")
        solution = read_solution(model, outcome)
        free = solution.bound
        apart = differing(asked, model, solution, end - cpu_seconds())
        watch.lap("ilp")
        for one in (apart, solution) if apart is not solution else (solution,):
            told = predicted(one, problem)
            if told[0].peak_bytes <= asked.budget_bytes:
                return problem, one, told
    problem = asked.problem()
    watch.lap("build")
    least = LeastMemory(problem, pruner, asked.time_limit)
    solution, told = _within_budget(asked, least, end - cpu_seconds(), free)
    if told[0].peak_bytes > asked.budget_bytes:
        solution, told = _within_budget(replace(asked, is_strict=True), least, max(end - cpu_seconds(), 0.0), free)
    watch.lap("ilp")
    return problem, solution, told


def _within_budget(asked: SolveRequest, least: LeastMemory, seconds: float, free: float) -> tuple[Solution, Predicted]:
    """The fastest plan within the budget, up to the solver's tolerance of rows; `free`: the bound without a budget."""
    end, pruner, problem, late = cpu_seconds() + seconds, least.pruner, least.problem, None
    try:
        model, outcome, is_all = fastest_within(pruner, problem, asked.usable_bytes, seconds, bound=free, small=least)
    except TimeLimitError as error:
        late = error
    if late is not None or (outcome.status == "infeasible" and not is_all):
        solution, told = _near_least_memory(asked, least, late)
        return replace(solution, bound=free), told
    if outcome.status == "infeasible":
        raise refusal(asked.budget_bytes, least, asked.constraints)
    solution = refined(asked, model, read_solution(model, outcome), end - cpu_seconds())
    return solution, predicted(solution, problem)


def _near_least_memory(
    asked: SolveRequest, least: LeastMemory, late: TimeLimitError | None
) -> tuple[Solution, Predicted]:
    """The plan of least memory if it fits, or a faster one near it; for a search that ran out of time, or that searched
    few choices and found no plan.

    Raises InfeasibleError if no plan that fits is known; TimeLimitError if the search ran out of time (`late`).
    """
    budget, problem = asked.budget_bytes, least.problem
    try:
        smallest = least.smallest()
    except TimeLimitError as error:
        raise late or error from None
    if smallest is None or smallest.bound_bytes > budget:
        raise too_small(budget, smallest, problem, asked.constraints)
    if smallest.budget_bytes <= budget:
        known = smallest.model, smallest.outcome
        near = fastest_near(least.pruner, problem, asked.usable_bytes, known, NEIGHBOURHOOD_SHARE * asked.time_limit)
        if near is not None:
            solution = read_solution(*near)
            told = predicted(solution, problem)
            if told[0].peak_bytes <= budget:  # the solver meets rows up to a tolerance
                return solution, told
    if late is None:
        raise too_small(budget, smallest, problem, asked.constraints)
    raise TimeLimitError(
        f"the solver found no plan within {asked.time_limit:.0f} seconds: give it more time_limit, or a larger memory "
        f"budget; the plan of least memory that it found needs {show_bytes_up(smallest.enough_bytes)}"
    ) from late


def _replicated_bytes(memory: StepMemory) -> int:
    """The bytes of all weights and their optimizer states if nothing is sharded."""
    whole = Layout.replicated(len(memory.mesh_shape))
    nodes = [node for node in memory.graph.nodes if memory.is_parameter(node)]
    return memory.fixed_bytes + sum(sum(memory.parameter_bytes(node, whole).values()) for node in nodes)
