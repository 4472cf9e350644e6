"""Into how many micro-batches to divide the batch of a step, where the user leaves it free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.arguments.checks import count_of
from autopar.errors import AutoparError, InfeasibleError, InputError, TimeLimitError, budget_bounds
from autopar.planning.stages import Prepared, Request, Stopwatch, prepare, trace_for
from autopar.plans import GAP, Certificate, Plan
from autopar.user_warnings import warn

Examples = Mapping[str, Any]

_NO_BUDGET = 1 << 60


def prepared_for(
    micro_batches: int | Sequence[int],
    model: nn.Module,
    meta_args: Examples,
    concrete_args: Examples | None,
    request: Request,
    starting: Callable[[int], None] = lambda count: None,
) -> Iterator[Prepared]:
    """What the request becomes with each number of micro-batches: the model traced and annotated; one after the other.

    The examples are of one micro-batch where a number is given, and of a step's whole batch where several are.
    `starting` is told each number first.

    Raises InputError where a number does not divide the batch, or leaves rows that the ranks cannot share.
    """
    ranks = request.cluster.devices if request.inputs == "local" else 1
    for count, examples in _divided(micro_batches, meta_args, ranks):
        starting(count)
        watch, mine = Stopwatch(), replace(request, micro_batches=count)
        yield prepare(model, trace_for(model, examples, concrete_args, mine, watch), mine, watch)


def _divided(micro_batches: int | Sequence[int], meta_args: Examples, ranks: int) -> list[tuple[int, Examples]]:
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        return [(count_of("micro_batches", micro_batches), meta_args)]
    if not micro_batches:
        raise InputError("micro_batches is empty: name the numbers to choose from, such as [1, 2, 4]")
    found = {count: part(meta_args, count, ranks) for count in micro_batches}
    return sorted(found.items(), key=lambda one: one[0])


def fastest(ready: Iterable[Prepared]) -> tuple[Prepared, Plan]:
    """The fastest of the plans that were asked for, and what it was made from.

    Its certificate speaks of all of them: its bound is the least. More micro-batches keep fewer activations and move
    parameters and activations more often, so that none can be left out unseen. Of a number for which no plan is found,
    and none is proven not to be there, a warning tells, and the bound is that without a budget.

    Raises the TimeLimitError of one for which there may be a plan where none has any, and the InfeasibleError of the
    one that needs least where none fits.
    """
    found: list[tuple[Prepared, Plan]] = []
    plans: list[Plan] = []
    bounds: list[float] = []
    refusals: list[InfeasibleError] = []
    late: list[tuple[Prepared, TimeLimitError | InfeasibleError]] = []
    for one in ready:
        request = one.request
        try:
            made = one.solve()
        except (InfeasibleError, TimeLimitError) as error:
            if isinstance(error, InfeasibleError):
                refusals.append(error)
            if not _is_proven(error, request):
                late.append((one, error))
            continue
        plans.append(made)
        bounds.append(made.certificate.bound)
        found = [min((*found, (one, made)), key=lambda pair: pair[1].predicted.step_seconds)]  # the others may go
    if not found:
        if timed_out := [reason for _, reason in late if isinstance(reason, TimeLimitError)]:
            raise timed_out[0]
        raise min(refusals, key=lambda one: one.smallest_budget_bytes or float("inf"))
    [(best, chosen)] = found
    for one, reason in late:
        bounds.append(_bound_without_budget(one))
        warn(f"{one.request.micro_batches} micro-batches are left out: {reason.message}")
    seconds = {stage: sum(made.planning_seconds.get(stage, 0.0) for made in plans) for stage in chosen.planning_seconds}
    return best, replace(chosen, certificate=_of_all(chosen.certificate, min(bounds)), planning_seconds=seconds)


def _of_all(own: Certificate, bound: float) -> Certificate:
    """What is proven of a plan where other numbers' plans may take no less than `bound`."""
    if bound >= own.bound:
        return own
    gap = (own.objective - bound) / own.objective if own.objective else 0.0
    return replace(own, status=own.status if gap <= GAP else "feasible", bound=bound, gap=gap)


def _is_proven(error: AutoparError, request: Request) -> bool:
    """Whether there is no plan, by the planner's count of memory."""
    if isinstance(error, TimeLimitError):
        return False
    least = budget_bounds(error)["budget_lower_bound_bytes"]
    return least is None or least >= request.budget_bytes_on(request.cluster)


def _bound_without_budget(one: Prepared) -> float:
    """Seconds that no plan goes below, whatever memory it takes; 0 where that takes too long to tell."""
    try:
        made = one.solve(memory_budget_bytes=_NO_BUDGET)
    except TimeLimitError:
        return 0.0
    return made.certificate.bound


def part(meta_args: Examples, count: int, ranks: int = 1) -> Examples:
    """Examples of one of `count` micro-batches, without data, of which `ranks` pass equal parts.

    The batch is dim 0 of the first tensor that has more than one row; tensors with as many rows are divided.

    >>> part({"ids": torch.empty(8, 3), "positions": torch.empty(1, 3)}, 4)["ids"].shape
    torch.Size([2, 3])
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InputError(f"micro_batches has {count!r}: every number must be whole, 1 or more")
    tensors = [leaf for leaf in pytree.tree_leaves(dict(meta_args)) if isinstance(leaf, torch.Tensor)]
    rows = next((t.shape[0] for t in tensors if t.dim() and t.shape[0] > 1), 1)
    if rows % count:
        raise InputError(f"micro_batches has {count}, which does not divide the {rows} rows of the examples' batch")
    if rows > 1 and rows // count % ranks:  # one row would lie whole on every rank, as of an example that has no batch
        raise InputError(
            f'micro_batches has {count}, and with inputs="local" each of the {ranks} ranks passes an equal part of a '
            f"micro-batch, which has {rows // count} of the {rows} rows of the examples' batch: leave {count} out, or "
            f"give a batch of a multiple of {count * ranks} rows"
        )

    def divided(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
            return leaf[: rows // count]
        return leaf

    found: Examples = pytree.tree_map(divided, dict(meta_args))
    return found
