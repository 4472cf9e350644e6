"""Converting a local tensor from one layout to another, and its gradient back: `convert(tensor, recipe)`.

A recipe is made once for the calling rank, from `resharding.reshard.steps`; it holds only numbers and group names.
`convert` is an autograd function: forward runs the actions of the steps, backward their conjugates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import torch

from autopar.layout import Layout
from autopar.resharding.reshard import Step, steps
from autopar.resharding.staging import memory_order, without_gaps
from autopar.runtime.communication import collectives, sparse
from autopar.runtime.communication.collectives import LocalMesh, ReduceOp
from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.communication.cuts import Cut, Regrouping
from autopar.runtime.gradients.second_derivatives import are_differentiated

ActionKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "pad", "keep_on_first", "divide"
]


@dataclass(frozen=True)
class Action:
    """One action of this rank on its local tensor along one mesh axis; the kind says which of the cuts are set.

    `handed`: number of elements that the first rank passes in, which has the most where a dim is not divided evenly.
    Decisions that depend on sizes use this number, so that all ranks decide alike.
    """

    kind: ActionKind
    group: str
    rank: int
    ranks: int
    cut: Cut | None = None
    new_cut: Cut | None = None
    op: ReduceOp = "sum"
    handed: int = 0

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run the action. The result has its dims in the same memory order as the tensor, so that what would be a view
        of one (merging heads again) is a view of the other. All ranks have the same order: it differs from the order of
        the dims only where the ranks' parts have one shape."""
        order = memory_order(tensor)
        ragged = any(cut is not None and cut.is_ragged for cut in (self.cut, self.new_cut))
        if ragged or order == tuple(range(tensor.dim())):
            return _APPLY[self.kind](self, tensor)
        cuts = [cut and replace(cut, dim=order.index(cut.dim)) for cut in (self.cut, self.new_cut)]
        result = _APPLY[self.kind](replace(self, cut=cuts[0], new_cut=cuts[1]), tensor.permute(order))
        return result.permute([order.index(d) for d in range(tensor.dim())])


def _all_reduce(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    return collectives.all_reduce(tensor, action.op, action.group)


def _all_gather(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    assert action.cut is not None
    pieces = collectives.all_gather(action.cut.pad(tensor), action.ranks, action.group)
    return action.cut.unstack(pieces).contiguous()


def _reduce_scatter(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    assert action.cut is not None
    piece = collectives.reduce_scatter(action.cut.stack(tensor), action.ranks, action.group)
    return piece.narrow(action.cut.dim, 0, action.cut.count(action.rank)).contiguous()


def _all_to_all(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    assert action.cut is not None
    assert action.new_cut is not None
    regrouping = Regrouping(action.cut, action.new_cut)
    flat = regrouping.packed(tensor, action.rank)
    sent = [math.prod(regrouping.block_shape(tensor.shape, action.rank, receiver)) for receiver in range(action.ranks)]
    shapes = [regrouping.block_shape(tensor.shape, sender, action.rank) for sender in range(action.ranks)]
    received = [math.prod(shape) for shape in shapes]
    flat = collectives.all_to_all(flat, sent, received, action.group)
    blocks = [part.view(shape) for part, shape in zip(flat.split(received), shapes, strict=True)]
    return regrouping.join(blocks, action.rank)


def _slice(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    assert action.cut is not None
    if action.cut.repeats(tensor):
        return action.cut.take(tensor, action.rank)
    # a copy: a view would keep the whole tensor in memory while the piece is saved for backward
    return action.cut.copy(tensor, action.rank)


def _pad(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    assert action.cut is not None
    return action.cut.put(tensor, action.rank)


def _keep_on_first(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    """The kept value gets the memory order of the other ranks' zeros, without gaps. Otherwise, results computed from it
    could differ in memory order from theirs, and a sum over ranks would add elements of different positions."""
    return without_gaps(tensor) if action.rank == 0 else torch.zeros_like(tensor)


def _divide(action: Action, tensor: torch.Tensor) -> torch.Tensor:
    return tensor / action.ranks


_APPLY = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "pad": _pad,
    "keep_on_first": _keep_on_first,
    "divide": _divide,
}


@dataclass(frozen=True)
class Stage:
    """Actions in the order in which they run; `read`: elements of the forward's result on the first rank."""

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    reduction_dtype: torch.dtype | None = None
    dtype: torch.dtype | None = None
    read: int = 0

    def gathered_bytes(self, shard: torch.Tensor) -> int:
        """Size of the forward's result on the first rank."""
        return self.read * (self.dtype or shard.dtype).itemsize

    def reduced_bytes(self, gradient: torch.Tensor) -> int:
        """Size of the backward's input on the first rank."""
        return handed(self.backward, gradient) * gradient.element_size()


def handed(actions: Sequence[Action], tensor: torch.Tensor) -> int:
    """How many elements the first rank passes to the first of `actions`."""
    return actions[0].handed if actions else tensor.numel()


@dataclass(frozen=True)
class Recipe:
    """What `convert` does on this rank; without stages, nothing."""

    stages: tuple[Stage, ...]

    @property
    def is_identity(self) -> bool:
        return not self.stages


def recipe(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh: LocalMesh,
    *,
    needs_grad: bool,
    dtype: torch.dtype | None = None,
    reduction_dtype: torch.dtype | None = None,
) -> Recipe:
    """How this rank converts its part of a tensor of global `shape` from layout `src` to `dst`.

    `dtype`: the value is cast to it first, so that a parameter's shards are sent in the compute dtype.
    `reduction_dtype`: gradients are summed over ranks in it; since the cast is part of the conversion, the sum reaches
    the parameter without being rounded to the compute dtype.
    """
    stages: list[Stage] = []
    for step in steps(src, dst, shape, mesh.shape, needs_grad=needs_grad):
        forward, backward = _actions(step, shape, mesh)
        if stages:
            last = stages.pop()
            forward, backward = last.forward + forward, backward + last.backward
        if forward or backward:
            read = math.prod(step.layout_after.local_shape(shape, mesh.shape))
            stages.append(Stage(forward, backward if needs_grad else (), reduction_dtype, None, read))
    if dtype is not None:
        if not stages:
            read = math.prod(src.local_shape(shape, mesh.shape))
            stages.insert(0, Stage((), (), reduction_dtype, read=read))
        stages[0] = replace(stages[0], dtype=dtype)
    return Recipe(tuple(stages))


@lru_cache(maxsize=1 << 12)
def _actions(step: Step, shape: tuple[int, ...], mesh: LocalMesh) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The forward and backward actions of one step, with `handed` filled in."""
    sizes = (math.prod(layout.local_shape(shape, mesh.shape)) for layout in (step.layout_before, step.layout_after))
    ways = zip(_of_step(step, shape, mesh), sizes, strict=True)
    forward, backward = (tuple(replace(action, handed=size) for action in actions) for actions, size in ways)
    return forward, backward


def _of_step(step: Step, shape: tuple[int, ...], mesh: LocalMesh) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The forward and backward actions of one step, by the table in `resharding.reshard`."""
    axis, src, dst = step.axis, step.src, step.dst
    if mesh.shape[axis] == 1:
        return (), ()
    plain = Action("slice", mesh.groups[axis], mesh.coordinate[axis], mesh.shape[axis])
    old = Cut.of(step.layout_before, axis, shape, mesh.shape, mesh.coordinate) if src.is_sharded else None
    new = Cut.of(step.layout_after, axis, shape, mesh.shape, mesh.coordinate) if dst.is_sharded else None

    def act(kind: ActionKind, cut: Cut | None = None, new_cut: Cut | None = None) -> tuple[Action, ...]:
        return (replace(plain, kind=kind, cut=cut, new_cut=new_cut),)

    if src.is_sharded:
        if dst.is_sharded:
            return act("all_to_all", old, new), act("all_to_all", new, old)
        if dst.is_partial:
            return act("pad", old), act("slice", old)
        return act("all_gather", old), act("reduce_scatter" if dst.partial_grad else "slice", old)
    if src.is_partial:
        if src.join in ("max", "min"):
            return (replace(plain, kind="all_reduce", op=src.join),), ()
        if dst.is_sharded:
            return act("reduce_scatter", new), act("all_gather", new)
        mean = act("divide") if src.join == "mean" else ()
        return act("all_reduce") + mean, (act("all_reduce") if dst.partial_grad else ()) + mean
    if dst.is_sharded:
        return act("slice", new), act("pad" if src.partial_grad else "all_gather", new)
    if dst.is_partial:
        return act("keep_on_first"), act("keep_on_first") if src.partial_grad else ()
    return (), act("keep_on_first" if src.partial_grad else "all_reduce")


def _cast(
    tensor: torch.Tensor, dtype: torch.dtype, actions: tuple[Action, ...]
) -> tuple[torch.Tensor, tuple[Action, ...]]:
    """The tensor in `dtype`, and the actions that remain. Leading slices are applied first, as views, so that only
    elements that stay on this rank are cast. The result has the memory order that `Action.apply` would give it."""
    cuts = [(a.cut, a.rank) for a in takewhile(lambda a: a.kind == "slice", actions) if a.cut is not None]
    if not cuts:
        return tensor.to(dtype), actions
    ragged = any(cut.is_ragged for cut, _ in cuts)
    order = tuple(range(tensor.dim())) if ragged else memory_order(tensor)
    for cut, rank in cuts:
        tensor = cut.take(tensor, rank)
    cast = tensor.permute(order).to(dtype, memory_format=torch.contiguous_format)
    return cast.permute([order.index(d) for d in range(tensor.dim())]), actions[len(cuts) :]


class _Moves(torch.autograd.Function):
    """The actions of a stage forward; their conjugates backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage, ctx.dtype, value, actions = stage, tensor.dtype, tensor, stage.forward
        if tensor.layout != torch.strided:
            return sparse.moved(tensor, stage)
        if stage.dtype not in (None, tensor.dtype):
            value, actions = _cast(tensor, stage.dtype, actions)
        for action in actions:
            value = action.apply(value)
        return value.view_as(value) if value is tensor else as_output(value, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        stage: Stage = ctx.stage
        if are_differentiated():
            return conjugate(gradient, stage).to(ctx.dtype), None
        for action in stage.backward:
            if stage.reduction_dtype is not None and action.kind in ("all_reduce", "reduce_scatter"):
                gradient = gradient.to(stage.reduction_dtype)
            gradient = action.apply(gradient)
        return gradient.to(ctx.dtype), None


def conjugate(gradient: torch.Tensor, stage: Stage) -> torch.Tensor:
    """The backward of a stage applied to a gradient, differentiable itself (for second derivatives)."""
    if stage.reduction_dtype is not None and any(a.kind in ("all_reduce", "reduce_scatter") for a in stage.backward):
        gradient = gradient.to(stage.reduction_dtype)
    moved: torch.Tensor = _Moves.apply(gradient, Stage(stage.backward, stage.forward))
    return moved


def convert(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """This rank's part of the tensor in the target layout of `recipe`; differentiable."""
    for stage in recipe.stages:
        if not stage.forward and not stage.backward and tensor.dtype == stage.dtype:
            continue
        tensor = _Moves.apply(tensor, stage)
    return tensor
