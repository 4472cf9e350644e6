"""Into how many micro-batches to divide the batch of a step, where the user leaves it free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.argument_checks import count_of
from autopar.errors import InfeasibleError, InputError
from autopar.planning import Prepared, Request, Stopwatch, prepare, trace_for
from autopar.plans import Plan

Examples = Mapping[str, Any]


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

    Raises InputError where a number does not divide the batch.
    """
    for count, examples in _divided(micro_batches, meta_args):
        starting(count)
        watch, mine = Stopwatch(), replace(request, micro_batches=count)
        yield prepare(model, trace_for(model, examples, concrete_args, mine, watch), mine, watch)


def _divided(micro_batches: int | Sequence[int], meta_args: Examples) -> list[tuple[int, Examples]]:
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str):
        return [(count_of("micro_batches", micro_batches), meta_args)]
    if not micro_batches:
        raise InputError("micro_batches is empty: name the numbers to choose from, such as [1, 2, 4]")
    found = {count: part(meta_args, count) for count in micro_batches}
    return sorted(found.items(), key=lambda one: one[0])


def fastest(ready: Iterable[Prepared]) -> tuple[Prepared, Plan]:
    """The fastest of the plans that were asked for, and what it was made from.

    Its certificate speaks of all of them: its bound is the least. More micro-batches keep fewer activations and move
    parameters and activations more often, so that none can be left out unseen.

    Raises the InfeasibleError of the one that needs least where none fits.
    """
    found: list[tuple[Prepared, Plan]] = []
    plans: list[Plan] = []
    refusals: list[InfeasibleError] = []
    for one in ready:
        request = one.request
        try:
            made = one.solve(memory_budget_bytes=request.memory_budget_bytes, constraints=request.constraints)
        except InfeasibleError as error:
            refusals.append(error)
            continue
        plans.append(made)
        found = [min((*found, (one, made)), key=lambda pair: pair[1].predicted.step_seconds)]  # the others may go
    if not found:
        raise min(refusals, key=lambda error: error.smallest_budget_bytes or float("inf"))
    [(best, chosen)] = found
    objective, bound = chosen.certificate.objective, min(made.certificate.bound for made in plans)
    gap = (objective - bound) / objective if objective else 0.0
    seconds = {stage: sum(made.planning_seconds.get(stage, 0.0) for made in plans) for stage in chosen.planning_seconds}
    return best, replace(
        chosen, certificate=replace(chosen.certificate, bound=bound, gap=gap), planning_seconds=seconds
    )


def part(meta_args: Examples, count: int) -> Examples:
    """Examples of one of `count` micro-batches, without data.

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

    def divided(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows:
            return leaf[: rows // count]
        return leaf

    found: Examples = pytree.tree_map(divided, dict(meta_args))
    return found
