"""What parameters and their gradients take on their way: copies gathered again, gradients that wait, buffers.

Of a parameter, as one use in backward wants it (`autopar.cost.buckets`: b bytes of its bucket):

=============  ==================================================================================================
gathered       b for a parameter that is gathered again, while the ops of its region run backward; and b of the
               bucket before, which arrives meanwhile
begun          where that takes several collectives: what all but the last leave of the bucket before that one
waiting        its own gradient, as the op gives it, until those of its bucket are there
reduction      b more, once they are: the buffer that is handed in
left behind    b until the next bucket's turn, where what comes out is not what was handed in (reduce-scatter)
reduced        its gradient as it is stored, in the dtype in which it travelled, until the end of backward
accumulated    what micro-batches before leave: unreduced where it moves
=============  ==================================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.buckets import Grouping
from autopar.cost.memory import StepMemory
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


def moving(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout, *, regather: bool
) -> Moving:
    """Of a parameter stored as `storage` that an op reads as `wanted`; equal ones of equal blocks are told once."""
    key = grouping.form(ref), storage, wanted, regather
    found = grouping.moved.get(key)
    if found is None:
        found = grouping.moved[key] = _moving(memory, grouping, ref, storage, wanted, regather=regather)
    return found


def _moving(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout, *, regather: bool
) -> Moving:
    tensor = tensor_of(ref)
    own = tensor.dtype.itemsize
    gathered = begun = 0
    whole = memory.local_bytes(ref, wanted)
    gathers, moves = conversion_moves(ref, storage, wanted, memory.mesh_shape, needs_grad=needs_grad(memory, ref))
    if regather and memory.read_bytes(ref.node, storage, wanted):
        gathered = grouping.bucket_bytes(ref, wanted, own)
        begun = gathered * sum(move.elements for move in gathers[1:]) * own // max(1, whole)
    if not memory.is_trainable(ref.node):
        return Moving(gathered, begun)
    moves = [move for move in moves if memory.mesh_shape[move.axis] > 1]
    if not moves:
        stored = memory.gradient_bytes(ref.node, storage)
        return Moving(gathered, begun, max(whole, stored), reduced=stored, accumulated=stored)
    travels = reduction_dtype(memory, ref).itemsize
    elements = math.prod(storage.local_shape(tuple(tensor.shape), memory.mesh_shape))
    bucket = grouping.bucket_bytes(ref, wanted, travels)
    scattered = any(move.kind != "all_reduce" for move in moves)
    others = max(0, grouping.bucket_bytes(ref, wanted, own) - whole)
    return Moving(
        gathered=gathered,
        begun=begun,
        waiting=whole,
        reduction=bucket,
        left_behind=bucket if scattered else 0,
        reduced=elements * travels,
        accumulated=whole // own * travels,
        others=max(0, others - others * elements * travels // max(1, whole)),
    )
