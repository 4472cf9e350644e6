"""What parameters and their gradients take on their way: copies gathered again, gradients that wait, buffers.

Of a parameter, as one use in backward wants it (`autopar.cost.buckets`: b bytes of its bucket):

=============  ==================================================================================================
gathered       b for a parameter that is gathered again, while the ops of its region run backward; and b of the
               bucket before, which arrives meanwhile
begun          where that takes several collectives: what all but the last leave of the bucket before that one
waiting        its own gradient, as the op gives it, until those of its bucket are there
reduction      b more, once they are: the buffer that is handed in
left behind    b until the next bucket's turn, where what comes out is not what was handed in (reduce-scatter); and
               half of b, where collectives behind the first hand in what is not their result: so much they may hold
reduced        its gradient as it is stored, in the dtype in which it travelled, until the end of backward
accumulated    what micro-batches before leave: unreduced where it moves
=============  ==================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost.buckets import Grouping
from autopar.cost.memory import StepMemory
from autopar.cost.reductions import HELD
from autopar.cost.traffic import conversion_moves, needs_grad, reduction_dtype
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class Moving:
    """Bytes of one parameter for one wanted layout; see the head of this file. `others`: what gradients of other
    regions in its bucket take beyond what they take once reduced."""

    gathered: int = 0
    begun: int = 0
    waiting: int = 0
    reduction: int = 0
    left_behind: int = 0
    reduced: int = 0
    accumulated: int = 0
    others: int = 0


class Way(NamedTuple):
    """Of the collectives that turn a parameter from its storage into what an op wants, and its gradient back.

    `further`: elements that all forward ones but the first hand in; `reduces`: whether any run backward, over axes of
    several devices; `scatters`: whether any of these is no all-reduce; `scatters_later`: any behind the first.
    """

    further: int
    reduces: bool
    scatters: bool
    scatters_later: bool


def moving(
    memory: StepMemory,
    grouping: Grouping,
    ref: TensorRef,
    storage: Layout,
    wanted: Layout,
    *,
    regather: bool,
    way: Way | None = None,
) -> Moving:
    """Of a parameter stored as `storage` that an op reads as `wanted`; equal ones of equal blocks are told once.

    `way`: where it is known already.
    """
    key = grouping.form(ref), storage, wanted, regather
    found = grouping.moved.get(key)
    if found is None:
        way = way or way_between(memory, ref, storage, wanted)
        found = grouping.moved[key] = _moving(memory, grouping, ref, storage, wanted, way, regather=regather)
    return found


def way_between(memory: StepMemory, ref: TensorRef, storage: Layout, wanted: Layout) -> Way:
    gathers, moves = conversion_moves(ref, storage, wanted, memory.mesh_shape, needs_grad=needs_grad(memory, ref))
    kinds = [move.kind for move in moves if memory.mesh_shape[move.axis] > 1]
    further = sum(move.elements for move in gathers[1:])
    scatters = [kind != "all_reduce" for kind in kinds]
    return Way(further, bool(kinds), any(scatters), any(scatters[1:]))


def _moving(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout, way: Way, *, regather: bool
) -> Moving:
    own = tensor_of(ref).dtype.itemsize
    gathered = begun = 0
    whole = memory.local_bytes(ref, wanted)
    if regather and memory.read_bytes(ref.node, storage, wanted):
        gathered = grouping.bucket_bytes(ref, wanted, own)
        begun = gathered * way.further * own // max(1, whole)
    if not memory.is_trainable(ref.node):
        return Moving(gathered, begun)
    if not way.reduces:
        stored = memory.gradient_bytes(ref.node, storage)
        return Moving(gathered, begun, max(whole, stored), reduced=stored, accumulated=stored)
    travels = reduction_dtype(memory, ref).itemsize
    elements = memory.local_bytes(ref, storage) // own
    bucket = grouping.bucket_bytes(ref, wanted, travels)
    others = max(0, grouping.bucket_bytes(ref, wanted, own) - whole)
    return Moving(
        gathered=gathered,
        begun=begun,
        waiting=whole,
        reduction=bucket,
        left_behind=(bucket if way.scatters else 0) + (bucket // HELD if way.scatters_later else 0),
        reduced=elements * travels,
        accumulated=whole // own * travels,
        others=max(0, others - others * elements * travels // max(1, whole)),
    )
