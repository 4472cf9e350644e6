"""Solving one request: first without the budget, then within it, and as a last resort near the plan of least memory.

The program without a budget has neither memory rows nor recompute and is solved many times faster. If its plan fits the
budget, no other plan is faster.
"""

from __future__ import annotations

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
from autopar.stopwatch import Stopwatch


def solve(request: SolveRequest, watch: Stopwatch) -> tuple[Problem, Solution, Predicted]:
    """The fastest plan of a request, with its problem and predicted cost. If unsharded parameters fit, it is first
    looked for without budget and recompute: if that plan fits, none is faster."""
    end, free, pruner = cpu_seconds() + request.time_limit, 0.0, Pruner(request.solver, request.gap)
    if _replicated_bytes(request.memory) <= request.budget_bytes and not request.restricted.forces_replays:
        with watch.stage("build"):
            problem = request.problem(recompute=False)
        with watch.stage("ilp"):
            model, outcome = pruner.free(problem, request.time_limit)
            solution = read_solution(model, outcome)
            apart = differing(request, model, solution, end - cpu_seconds())
        free = solution.bound
        for candidate in (apart, solution) if apart is not solution else (solution,):
            prediction = predicted(candidate, problem)
            if prediction[0].peak_bytes <= request.budget_bytes:
                return problem, candidate, prediction
    with watch.stage("build"):
        problem = request.problem()
    with watch.stage("ilp"):
        least = LeastMemory(problem, pruner, request.time_limit)
        solution, prediction = _within_budget(request, least, end - cpu_seconds(), free)
        if prediction[0].peak_bytes > request.budget_bytes:
            strict = replace(request, is_strict=True)
            solution, prediction = _within_budget(strict, least, max(end - cpu_seconds(), 0.0), free)
    return problem, solution, prediction


def _within_budget(
    request: SolveRequest, least: LeastMemory, seconds: float, free: float
) -> tuple[Solution, Predicted]:
    """The fastest plan within the budget, up to the solver's tolerance of rows; `free`: the bound without a budget."""
    end, pruner, problem, late = cpu_seconds() + seconds, least.pruner, least.problem, None
    try:
        model, outcome, is_all = fastest_within(pruner, problem, request.usable_bytes, seconds, bound=free, small=least)
    except TimeLimitError as error:
        late = error
    if late is not None or (outcome.status == "infeasible" and not is_all):
        solution, prediction = _near_least_memory(request, least, late)
        return replace(solution, bound=free), prediction
    if outcome.status == "infeasible":
        raise refusal(request.budget_bytes, least, request.constraints)
    solution = refined(request, model, read_solution(model, outcome), end - cpu_seconds())
    return solution, predicted(solution, problem)


def _near_least_memory(
    request: SolveRequest, least: LeastMemory, late: TimeLimitError | None
) -> tuple[Solution, Predicted]:
    """The plan of least memory if it fits, or a faster one near it; for a search that ran out of time, or that searched
    few choices and found no plan.

    Raises InfeasibleError if no plan that fits is known; TimeLimitError if the search ran out of time (`late`).
    """
    budget, problem = request.budget_bytes, least.problem
    try:
        smallest = least.smallest()
    except TimeLimitError as error:
        raise late or error from None
    if smallest is None or smallest.bound_bytes > budget:
        raise too_small(budget, smallest, problem, request.constraints)
    if smallest.budget_bytes <= budget:
        smallest_plan = smallest.model, smallest.outcome
        near = fastest_near(
            least.pruner, problem, request.usable_bytes, smallest_plan, NEIGHBOURHOOD_SHARE * request.time_limit
        )
        if near is not None:
            solution = read_solution(*near)
            prediction = predicted(solution, problem)
            if prediction[0].peak_bytes <= budget:  # the solver meets rows up to a tolerance
                return solution, prediction
    if late is None:
        raise too_small(budget, smallest, problem, request.constraints)
    raise TimeLimitError(
        f"the solver found no plan within {request.time_limit:.0f} seconds: give it more time_limit, or a larger "
        f"memory budget; the plan of least memory that it found needs {show_bytes_up(smallest.enough_bytes)}"
    ) from late


def _replicated_bytes(memory: StepMemory) -> int:
    """The bytes of all weights and their optimizer states if nothing is sharded."""
    whole = Layout.replicated(len(memory.mesh_shape))
    nodes = [node for node in memory.graph.nodes if memory.is_parameter(node)]
    return memory.fixed_bytes + sum(sum(memory.parameter_bytes(node, whole).values()) for node in nodes)
