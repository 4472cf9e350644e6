"""Staging buffers: the memory that a conversion needs for a moment beside its input and output. Pure functions, shared
by cost and solver.

A collective's buffer has one piece after another. If the cut dim is the outermost in memory, the tensor itself has this
order. Otherwise all pieces are copied: before a reduce-scatter, after an all-gather, and on at least one side of an
all-to-all (`communication.convert`, `communication.cuts`). Ragged pieces are padded to the longest, and copied
whichever dim is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from autopar.layout import Layout, R
from autopar.resharding.reshard import CollectiveKind, Shape, Step, local_elements

Order = tuple[int, ...]


def memory_order(tensor: torch.Tensor) -> Order:
    """The dims of a tensor in their order in memory, outermost first; in index order if the tensor has gaps.

    The strides of dims of length one are ignored, because they may differ between ranks: `contiguous()` keeps the
    strides of a part whose permuted dims have length one.

    >>> memory_order(torch.empty(2, 3, 4).transpose(1, 2)), memory_order(torch.empty(4, 1).expand(4, 3))
    ((0, 2, 1), (0, 1))
    >>> memory_order(torch.empty(1, 4).t().contiguous()), torch.empty(1, 4).t().contiguous().stride()
    ((0, 1), (1, 4))
    """
    order = _outermost_first(tensor)
    lies_so = not tensor.is_contiguous() and tensor.permute(order).is_contiguous()
    return order if lies_so else tuple(range(tensor.dim()))


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or, if it has gaps (every other column, an expanded row), a copy without gaps whose strides are those
    of `zeros_like`.

    >>> x = torch.zeros(4, 6)[:, ::2].t()
    >>> without_gaps(x).stride() == torch.zeros_like(x).stride()
    True
    """
    return tensor if tensor.permute(_outermost_first(tensor)).is_contiguous() else tensor.clone()


def _outermost_first(tensor: torch.Tensor) -> Order:
    strides = [math.inf if n == 1 else stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tuple(sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True))


def staged_elements(path: Sequence[Step], shape: Shape, mesh_shape: Shape, order: Order) -> tuple[int, int]:
    """The most elements that the first rank holds during a path beside the path's input and output, forward and
    backward: staging buffers, and intermediate tensors between two steps. `shape` is the tensor's global shape, `order`
    the order of its dims in memory.

    >>> from autopar.resharding.reshard import steps
    >>> path = steps(Layout.parse("S1"), Layout.parse("R+"), (8, 4), (2,), needs_grad=True)
    >>> staged_elements(path, (8, 4), (2,), (0, 1)), staged_elements(path, (8, 4), (2,), (1, 0))
    ((32, 32), (0, 0))
    """
    staged = []
    for backward in (False, True):
        each = _changes(path, shape, mesh_shape, order, backward=backward)
        most = max((bool(i) * change.input + change.staged + change.output for i, change in enumerate(each)), default=0)
        staged.append(max(0, most - each[-1].output) if each else 0)
    return staged[0], staged[1]


def makes_another(path: Sequence[Step], shape: Shape, mesh_shape: Shape) -> tuple[bool, bool]:
    """Whether a path's result is another tensor than its input, forward and backward.

    >>> from autopar.resharding.reshard import steps
    >>> makes_another(steps(Layout.parse("P"), Layout.parse("R"), (8, 4), (2,), needs_grad=True), (8, 4), (2,))
    (True, False)
    """
    order = tuple(range(len(shape)))
    forward, backward = (
        bool(_changes(path, shape, mesh_shape, order, backward=backwards)) for backwards in (False, True)
    )
    return forward, backward


def _changes(path: Sequence[Step], shape: Shape, mesh_shape: Shape, order: Order, *, backward: bool) -> list[Held]:
    """What each step of the path holds, in the order in which they run; steps that return their input are left out."""
    changes = []
    for step in path[::-1] if backward else path:
        ends = (step.layout_before, step.layout_after)[:: -1 if backward else 1]
        move = step.backward if backward else step.forward
        kind = move.kind if move else None
        changes.append(held(*ends, step.axis, kind, shape, mesh_shape, order, backward=backward))
    return [change for change in changes if change.is_other]


class Held(NamedTuple):
    """Elements in a change of one axis: of its input, its staging buffers and its output; `is_other`: whether the
    output is another tensor than the input."""

    input: int
    staged: int
    output: int
    is_other: bool


@lru_cache(maxsize=1 << 16)
def held(
    source: Layout,
    result: Layout,
    axis: int,
    kind: CollectiveKind | None,
    shape: Shape,
    mesh_shape: Shape,
    order: Order,
    *,
    backward: bool,
) -> Held:
    """What a change of one axis holds; `kind`: its collective, if it has one."""
    before, after = local_elements(source, shape, mesh_shape), local_elements(result, shape, mesh_shape)
    if kind == "all_to_all":
        return Held(before, max(before, after), after, True)
    if kind not in ("all_gather", "reduce_scatter"):
        others_give_zeros = result[axis].partial_grad if backward else result[axis].is_partial
        is_other = kind is not None or source[axis].is_sharded or result[axis].is_sharded or others_give_zeros
        return Held(before, 0, after, is_other and mesh_shape[axis] > 1)
    part, pieces = (before, source) if kind == "all_gather" else (after, result)
    cut, others = pieces[axis], pieces.replace(axis, R)
    lengths = others.local_shape(shape, mesh_shape)
    length, ranks = lengths[cut.dim], mesh_shape[axis]
    if shape[cut.dim] % math.prod(d.size for d in pieces.digits(cut.dim, mesh_shape)):  # ragged on some rank
        longest = -(-length // ranks)
        short = length % longest if length % ranks else longest  # length of a piece that is padded before a gather
        return Held(before, ranks * part + (part // longest * short if kind == "all_gather" else 0), after, True)
    outer = math.prod(d.size for d in others.digits(cut.dim, mesh_shape) if d.outer < cut.outer)
    lies_so = cut.outer == outer and all(lengths[dim] == 1 for dim in order[: order.index(cut.dim)])
    return Held(before, 0 if lies_so else ranks * part, after, True)
