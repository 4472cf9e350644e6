"""The collectives between a parameter's storage and the layout in which an op reads it, in numbers of elements."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.traffic import conversion_moves, needs_grad
from autopar.graph import TensorRef
from autopar.layout import Layout
from autopar.resharding.reshard import CollectiveKind

RESULT: dict[CollectiveKind, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda handed, ranks: 0,  # in place
    "all_gather": lambda handed, ranks: handed * ranks,
    "reduce_scatter": lambda handed, ranks: handed // ranks,
    "all_to_all": lambda handed, ranks: handed,
}
"""Elements of a collective's result that is not in place, from the elements of its input and the number of ranks (both
may be arrays)."""
IN_ANOTHER_ORDER: tuple[CollectiveKind, ...] = ("all_gather", "all_to_all")
"""Collectives whose result is in the order of ranks, so that tensors in their own order are made of it."""


class TransferPath(NamedTuple):
    """The collectives, over axes of several devices, that convert a parameter from its storage to the layout that an op
    wants, and its gradient back; sizes are numbers of elements.

    Forward: `further`: inputs of all collectives but the first; `last`: the last one's input, and `came`: its result,
    larger than wanted if it is then cut to a slice. Backward: `reduces`: whether there are any; `result`: the first
    one's result, if it is not in place; `scatters`: whether any is not an all-reduce; `scatters_later`: whether any
    after the first is not; `arrives`: the last one's result, if gradients are made of it; `passes`: the most that is
    there when one has arrived and the next begins, 0 if there is only one.
    """

    further: int
    last: int
    came: int
    reduces: bool
    result: int
    scatters: bool
    scatters_later: bool
    arrives: int
    passes: int


def transfer_path(memory: StepMemory, ref: TensorRef, storage: Layout, wanted: Layout) -> TransferPath:
    """The collectives of a parameter stored as `storage` that an op reads as `wanted`; LayoutError if none lead
    there."""
    mesh = memory.mesh_shape
    both = conversion_moves(ref, storage, wanted, mesh, needs_grad=needs_grad(memory, ref))
    gathers, reductions = ([move for move in moves if mesh[move.axis] > 1] for moves in both)
    handed = [gather.elements for gather in gathers] or [0]
    came, results = (
        [RESULT[move.kind](move.elements, mesh[move.axis]) for move in moves] or [0] for moves in (gathers, reductions)
    )
    scatters = [reduction.kind != "all_reduce" for reduction in reductions]
    passes = [0]
    for (first, first_result), (then, then_result) in pairwise(zip(reductions, results, strict=False)):
        arrived = first_result or first.elements
        passes.append(arrived * (1 + (first.kind in IN_ANOTHER_ORDER)))
        passes += arrived + then.elements, then.elements + then_result
    return TransferPath(
        further=sum(handed[1:]),
        last=handed[-1],
        came=came[-1],
        reduces=bool(reductions),
        result=results[0],
        scatters=any(scatters),
        scatters_later=any(scatters[1:]),
        arrives=results[-1] if reductions and reductions[-1].kind in IN_ANOTHER_ORDER else 0,
        passes=max(passes),
    )
