"""The error when no plan fits the budget: the smallest budget that has a plan, what fills it, and what could help.

Proofs hold for the memory rows, which never count less than a plan takes, and mostly at most 1 % more (more if small
blocks share a bucket). So a plan of slightly less memory may exist. If a program of all choices would be too large
(`solver.search.under_budget`), so may a plan of choices that were not searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.cost.memory.formulas import StepMemory
from autopar.errors import InfeasibleError, TimeLimitError
from autopar.graph import output_tensors
from autopar.plans import Moment
from autopar.sizes import show_bytes, show_bytes_down, show_bytes_up
from autopar.solver.problem import Problem
from autopar.solver.search.smallest import LeastMemory, Smallest
from autopar.solver.solution import Solution, predicted, read_solution

_CLOSE = 0.98  # from this part of the least plan's memory on, a budget may fail only because rows count too much
_OF_ROWS = ("activations", "replayed block", "workspace", "logits and loss")  # parts that shrink with the batch rows
_GIVEN = "inputs and outputs"  # this part shrinks too; every moment has it
_WORTH = 1e-2  # least saving that is worth a hint, as a part of all bytes that plans can save


def refusal(budget: int, least: LeastMemory, constraints: Sequence[str]) -> InfeasibleError:
    """The error when it is proven, by the memory rows, that no plan fits."""
    try:
        smallest = least.smallest(too_small=budget)
    except TimeLimitError:
        return InfeasibleError(
            f"no plan fits {show_bytes(budget, digits=2)} per device; the smallest budget that has a plan was not "
            "found in time: try a larger one, or a longer time_limit",
            budget_lower_bound_bytes=budget,
        )
    return too_small(budget, smallest, least.problem, constraints)


def too_small(budget: int, smallest: Smallest | None, problem: Problem, constraints: Sequence[str]) -> InfeasibleError:
    """The error when the smallest budget that has a plan is known; `smallest` is None if no budget has one."""
    if smallest is None:
        return InfeasibleError("no plan meets the constraints, whatever the budget: relax one of them")
    solution = read_solution(smallest.model, smallest.outcome)
    moment = max(predicted(solution, problem)[0].moments, key=lambda m: m.total_bytes)
    largest = sorted(moment.parts.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in largest)
    enough = smallest.enough_bytes
    bound = min(math.floor(smallest.bound_bytes), enough)
    finding = "the smallest budget that the planner finds one for is"
    if bound < 0.99 * smallest.budget_bytes:
        finding = f"no plan fits less than {show_bytes_down(bound)}, and the planner finds one for"
    budget_text, needed = show_bytes(budget, digits=2), show_bytes_up(enough)
    if budget_text == needed:  # equal as shown
        budget_text, needed = f"{budget} B", f"{enough} B"
    message = f"no plan fits {budget_text} per device: {finding} {needed} (its peak, in '{moment.name}': {parts})"
    if bound < budget:  # not all choices were searched
        least = show_bytes_down(bound)
        message = (
            f"no plan was found that fits {budget_text} per device: none fits less than {least}, and the smallest one "
            f"that was found needs {needed} (its peak, in '{moment.name}': {parts})"
        )
    hints = list(_hints(budget, moment, solution, problem, constraints))
    if _CLOSE * smallest.budget_bytes <= budget <= bound:
        hints.insert(0, "the planner may overestimate the memory a little: a plan just below this budget may exist")
    return InfeasibleError(
        message + "".join(f"; {hint}" for hint in hints),
        smallest_budget_bytes=enough,
        budget_lower_bound_bytes=bound,
    )


def _hints(
    budget: int, moment: Moment, solution: Solution, problem: Problem, constraints: Sequence[str]
) -> Iterator[str]:
    """Hints at what can help; none says by how much."""
    memory, fixed = problem.memory, problem.memory.fixed_bytes
    if fixed >= budget:
        others = (
            ", and the optimizer state of parameters that other calls train"
            if memory.fixed.get("optimizer state")
            else ""
        )
        held_by = f"the allocator's overhead, and weights that the call does not read{others}"
        yield f"no plan can save {show_bytes(fixed)} of this: {held_by}"
    of_rows = any(moment.parts.get(name) for name in _OF_ROWS)
    ways = []
    if of_rows or any(not parameter.storage.is_replicated for parameter in solution.parameters.values()):
        ways.append("a larger mesh axis")
    if moment.total_bytes - _with_fewest_rows(solution, problem) > _WORTH * (moment.total_bytes - fixed):
        ways.append("more micro-batches")
    if moment.parts.get("optimizer state"):
        ways.append("another optimizer")
    if ways:
        yield f"{' or '.join(filter(None, [', '.join(ways[:-1]), ways[-1]]))} may need less"
    if constraints:
        yield "without the constraints a smaller budget may be enough"


def _with_fewest_rows(solution: Solution, problem: Problem) -> float:
    """The peak of the same plan with as many micro-batches as leave each rank a row, and at least two. With several
    micro-batches gradients are kept from one to the next, so a plan of large weights and few rows can need more."""
    memory = problem.memory
    micro_batches = min(_rows(memory), max(2, _rows(memory) // problem.cluster.devices))
    if not memory.train or micro_batches == 1:
        return math.inf
    moments = predicted(solution, replace(problem, memory=replace(memory, micro_batches=2)))[0].moments
    saved = 1 - 1 / micro_batches
    return max(m.total_bytes - saved * sum(m.parts.get(name, 0) for name in (*_OF_ROWS, _GIVEN)) for m in moments)


def _rows(memory: StepMemory) -> int:
    """The rows of the graph's batch, as `autopar.planning.micro_batches.part` would divide it."""
    inputs = (t for node in memory.graph.nodes if node.op == "placeholder" for t in output_tensors(node))
    return next((tensor.shape[0] for tensor in inputs if tensor.dim() and tensor.shape[0] > 1), 1)
