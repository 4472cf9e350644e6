"""The choice of the number of micro-batches of a step, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.arguments.checks import count_of
from autopar.errors import AutoparError, InfeasibleError, InputError, TimeLimitError, budget_bounds
from autopar.planning.stages import Prepared, Request, prepare, trace_for
from autopar.plans import GAP, Certificate, Plan
from autopar.stopwatch import Stopwatch
from autopar.user_warnings import warn

Examples = Mapping[str, Any]

_NO_BUDGET = 1 << 60  # bytes: a budget that never binds


def prepared_for(
    micro_batches: int | Sequence[int],
    model: nn.Module,
    meta_args: Examples,
    concrete_args: Examples | None,
    request: Request,
    starting: Callable[[int], None] = lambda count: None,
) -> Iterator[Prepared]:
    """The preparation (model traced and annotated) for each number of micro-batches, one after the other.

    If `micro_batches` is a number, the examples are one micro-batch; if it is a list, they are the whole batch of a
    step. `starting` is called with each number before its preparation.

    Raises InputError where a number does not divide the batch, or leaves rows that the ranks cannot share equally.
    """
    ranks = request.cluster.devices if request.inputs == "local" else 1
    for count, examples in _divided(micro_batches, meta_args, ranks):
        starting(count)
        watch, of_count = Stopwatch(), replace(request, micro_batches=count)
        yield prepare(model, trace_for(model, examples, concrete_args, of_count, watch), of_count, watch)


def _divided(micro_batches: int | Sequence[int], meta_args: Examples, ranks: int) -> list[tuple[int, Examples]]:
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        return [(count_of("micro_batches", micro_batches), meta_args)]
    if not micro_batches:
        raise InputError("micro_batches is empty: name the numbers to choose from, such as [1, 2, 4]")
    parts = {count: part(meta_args, count, ranks) for count in micro_batches}
    return sorted(parts.items(), key=lambda count_and_part: count_and_part[0])


def fastest(ready: Iterable[Prepared]) -> tuple[Prepared, Plan]:
    """The fastest plan of all preparations, and the preparation that it is from.

    Its certificate covers all numbers of micro-batches: the bound is the least of theirs. No number can be skipped
    unsolved, as more micro-batches keep fewer activations but move parameters and activations more often. A number
    without a plan that is not proven infeasible is left out with a warning, and contributes its bound without a budget.

    If none has a plan, raises the TimeLimitError of a number that may still have one, else the InfeasibleError of the
    number that needs the least memory.
    """
    best_so_far: list[tuple[Prepared, Plan]] = []
    plans: list[Plan] = []
    bounds: list[float] = []
    refusals: list[InfeasibleError] = []
    late: list[tuple[Prepared, TimeLimitError | InfeasibleError]] = []
    for prepared in ready:
        request = prepared.request
        try:
            plan = prepared.solve()
        except (InfeasibleError, TimeLimitError) as error:
            if isinstance(error, InfeasibleError):
                refusals.append(error)
            if not _is_proven(error, request):
                late.append((prepared, error))
            continue
        plans.append(plan)
        bounds.append(plan.certificate.bound)
        pairs = (*best_so_far, (prepared, plan))
        best_so_far = [min(pairs, key=lambda pair: pair[1].predicted.step_seconds)]  # frees slower plans
    if not best_so_far:
        if timed_out := [reason for _, reason in late if isinstance(reason, TimeLimitError)]:
            raise timed_out[0]
        raise min(refusals, key=lambda refusal: refusal.smallest_budget_bytes or float("inf"))
    [(best, chosen)] = best_so_far
    for prepared, reason in late:
        bounds.append(_bound_without_budget(prepared))
        warn(f"{prepared.request.micro_batches} micro-batches are left out: {reason.message}")
    seconds = {stage: sum(plan.planning_seconds.get(stage, 0.0) for plan in plans) for stage in chosen.planning_seconds}
    return best, replace(chosen, certificate=_of_all(chosen.certificate, min(bounds)), planning_seconds=seconds)


def _of_all(own: Certificate, bound: float) -> Certificate:
    """The certificate of a plan, weakened if other numbers of micro-batches have only the lower bound `bound`."""
    if bound >= own.bound:
        return own
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    return replace(own, status=own.status if gap <= GAP else "feasible", bound=bound, gap=gap)


def _is_proven(error: AutoparError, request: Request) -> bool:
    """Whether an error proves that there is no plan, according to the planner's memory model."""
    if isinstance(error, TimeLimitError):
        return False
    least = budget_bounds(error)["budget_lower_bound_bytes"]
    return least is None or least >= request.budget_bytes_on(request.cluster)


def _bound_without_budget(prepared: Prepared) -> float:
    """Lower bound in seconds for any plan, whatever memory it takes; 0 where that takes too long to compute."""
    try:
        plan = prepared.solve(memory_budget_bytes=_NO_BUDGET)
    except TimeLimitError:
        return 0.0
    return plan.certificate.bound


def part(meta_args: Examples, count: int, ranks: int = 1) -> Examples:
    """Data-free examples of one of `count` micro-batches, of which each of `ranks` ranks passes an equal part.

    The batch is dim 0 of the first tensor with more than one row; all tensors with as many rows are divided.

    >>> part({"ids": torch.empty(8, 3), "positions": torch.empty(1, 3)}, 4)["ids"].shape
    torch.Size([2, 3])
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"micro_batches has {count!r}: every number must be whole, 1 or more")
    tensors = [leaf for leaf in pytree.tree_leaves(dict(meta_args)) if isinstance(leaf, torch.Tensor)]
    rows = next((t.shape[0] for t in tensors if t.dim() and t.shape[0] > 1), 1)
    if rows % count:
        raise InputError(f"micro_batches has {count}, which does not divide the {rows} rows of the examples' batch")
    if rows > 1 and rows // count % ranks:  # a single row is replicated, like an input without a batch
        raise InputError(
            f'micro_batches has {count}, and with inputs="local" each of the {ranks} ranks passes an equal part of a '
            f"micro-batch, which has {rows // count} of the {rows} rows of the examples' batch: leave {count} out, or "
            f"give a batch of a multiple of {count * ranks} rows"
        )

    def divided(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
            return leaf[: rows // count]
        return leaf

    examples: Examples = pytree.tree_map(divided, dict(meta_args))
    return examples
