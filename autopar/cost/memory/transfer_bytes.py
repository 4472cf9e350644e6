"""Bytes that the transfers of a parameter and its gradient hold: copies gathered again, gradients that wait, buffers.

Of a parameter in the layout that one use in backward wants, of whose bucket b bytes are charged to it
(`cost.buckets.buckets`):

=============  ==================================================================================================
gathered       b for a parameter that is gathered again, while the ops of its region run backward
arriving       b of the bucket read next, which arrives meanwhile, and the input of its last collective; more than b if
               that collective's result is cut to a slice
landing        2 b when it has arrived: the last collective's result, in the order of ranks, and the parameters made of
               it; twice that result, if it is cut to a slice
begun          of the bucket read after that: the results of all its collectives but the last, if there are several
waiting        its own gradient, as the op makes it, until all of its bucket are there; and the first collective's
               result, if no smaller (all-to-all, all-gather), since the bucket may be reduced at any later op
cast           if its gradient moves nowhere: that as the op makes it, beside its cast to the dtype that is stored
reduction      when all are there: b more, the collective's input buffer, and its result if that is another tensor, also
               of other regions in the bucket, or a copy of all pieces in their order, if they are interleaved or ragged
               (`pieces_are_copied`); or what is there when the next collective of the bucket after begins, if
               that is more; and half of b, if collectives after the first are not in place: so much may these hold
left behind    b until the next bucket's turn, if the reduction is not in place (reduce-scatter); the first collective's
               result beyond the last one's, if several follow one another; and half of b, as above
left of one    the same for one block's part of a bucket that several blocks share and recompute divides
left of rest   the same for all other blocks' part, where one block is recomputed alone, beyond what is in `others`
reduced        its gradient as stored, in the dtype in which it was reduced, until the end of backward
landed         at the end of backward: b of its reduced bucket while that is cast to the dtype of the parameters, while
               gradients are made of a result by ranks (all-to-all, all-gather), or when its last collective begins
accumulated    what the micro-batches before leave: unreduced, if it is to be reduced at all
copied         without backward: its own copy, gathered or not, from its arrival until its last reader
=============  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.reductions import HELD
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.piece_copies import pieces_are_copied
from autopar.cost.memory.transfer_path import TransferPath, transfer_path
from autopar.cost.traffic import reduction_dtype
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout


@dataclass(frozen=True, slots=True)
class TransferBytes:
    """Bytes of one parameter for one wanted layout, as in the module docstring. `others`: what other regions' gradients
    in its bucket take before they are reduced beyond what they take afterwards (with several micro-batches, all of it).
    `alone`: the factor by which all of these are larger if the parameter is a bucket of its own."""

    gathered: int = 0
    arriving: int = 0
    landing: int = 0
    begun: int = 0
    waiting: int = 0
    cast: int = 0
    reduction: int = 0
    left_behind: int = 0
    left_of_one: int = 0
    left_of_rest: int = 0
    reduced: int = 0
    landed: int = 0
    accumulated: int = 0
    others: int = 0
    copied: int = 0
    alone: float = 1.0


def largest_bucket_bytes(transfers: Iterable[TransferBytes], field: str, *, together: bool = False) -> int:
    """The bytes in a field of `TransferBytes` of the largest bucket of a region's parameters: that of all of them, each
    with its charged part, or of one parameter alone. `together`: only buckets of several parameters."""
    sizes = [(getattr(transfer, field), transfer.alone) for transfer in transfers]
    alone = [0 if together else round(size * factor) for size, factor in sizes]
    return max(sum(size for size, _ in sizes), *alone, 0)


def transfer_bytes(
    memory: StepMemory,
    grouping: Grouping,
    ref: TensorRef,
    storage: Layout,
    wanted: Layout,
    *,
    regather: bool,
    path: TransferPath | None = None,
) -> TransferBytes:
    """The bytes of a parameter stored as `storage` that an op reads as `wanted`, cached for equal blocks.

    `regather`: whether its copy is gathered again in backward. `path`: its collectives, if known already.
    """
    key = grouping.form(ref), storage, wanted, regather
    transfer = grouping.transfers.get(key)
    if transfer is None:
        path = path or transfer_path(memory, ref, storage, wanted)
        gathers = _of_gathers(memory, grouping, ref, storage, wanted, path, regather=regather)
        if not memory.is_trainable(ref.node):
            transfer = TransferBytes(**gathers)
        elif not path.reduces:
            transfer = TransferBytes(**gathers, **_of_unmoved_gradient(memory, ref, storage, wanted))
        else:
            transfer = TransferBytes(**gathers, **_of_reductions(memory, grouping, ref, storage, wanted, path))
        grouping.transfers[key] = transfer
    return transfer


def replay_transfer_bytes(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout
) -> TransferBytes:
    """The bytes for a replay that gathers a parameter whose copy the plan keeps: only of what is in flight, since
    copies count with the ops that keep them.

    A replayed block's bucket holds its own parameters alone. Where blocks otherwise share a bucket, that of the block
    before is in flight meanwhile; it counts as `gathered`, since no other bucket is in flight in these regions.
    """
    path, whole = transfer_path(memory, ref, storage, wanted), memory.local_bytes(ref, wanted)
    if not path.last or not whole:
        return TransferBytes()
    itemsize = tensor_of(ref).dtype.itemsize
    block = grouping.one_of_bucket(ref, wanted, itemsize)
    came = block * max(path.came * itemsize, whole) // whole
    arriving = came + block * path.last * itemsize // whole
    shares = grouping.bucket_bytes(ref, wanted, itemsize) > block
    begun = block * path.further * itemsize // whole
    return TransferBytes(arriving if shares else 0, arriving, came, begun, alone=grouping.alone(ref, wanted))


def _of_gathers(
    memory: StepMemory,
    grouping: Grouping,
    ref: TensorRef,
    storage: Layout,
    wanted: Layout,
    path: TransferPath,
    *,
    regather: bool,
) -> dict[str, Any]:
    """The fields that concern the parameter."""
    copy_bytes, whole = memory.read_bytes(ref.node, storage, wanted), max(1, memory.local_bytes(ref, wanted))
    copied = copy_bytes if not memory.train else 0
    fields = {"copied": copied, "alone": grouping.alone(ref, wanted)}
    if not (regather and copy_bytes) and not (copied and path.last):
        return fields
    itemsize = tensor_of(ref).dtype.itemsize
    bucket = grouping.bucket_bytes(ref, wanted, itemsize)
    came = bucket * max(path.came * itemsize, memory.local_bytes(ref, wanted)) // whole
    return fields | {
        "gathered": bucket,
        "begun": bucket * path.further * itemsize // whole,
        "arriving": came + bucket * path.last * itemsize // whole,
        "landing": 2 * came if path.last else bucket,
    }


def _of_unmoved_gradient(memory: StepMemory, ref: TensorRef, storage: Layout, wanted: Layout) -> dict[str, int]:
    """The fields that concern a gradient that no collective moves."""
    whole, stored = memory.local_bytes(ref, wanted), memory.gradient_bytes(ref.node, storage)
    is_cast = memory.stored_dtype(ref.node) != tensor_of(ref).dtype
    return {
        "waiting": max(whole, stored),
        "cast": whole if is_cast else 0,
        "reduced": stored,
        "accumulated": stored,
    }


def _of_reductions(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout, path: TransferPath
) -> dict[str, int]:
    """The fields that concern a gradient that is reduced."""
    own, sent = tensor_of(ref).dtype.itemsize, reduction_dtype(memory, ref).itemsize
    gradient = memory.local_bytes(ref, wanted)  # as the op makes it
    whole = max(1, gradient)
    elements = memory.local_bytes(ref, storage) // own  # as it is stored
    bucket = grouping.bucket_bytes(ref, wanted, sent)
    result = path.result * own
    early = result if result >= gradient else 0  # a result that counts from when the gradient is there
    later_collectives = bucket // HELD if path.scatters_later else 0

    next_input = max(0, result - elements * own) if path.passes else 0  # the next collective's, beyond its result
    left_behind = (bucket if path.scatters else 0) + bucket * next_input // whole + later_collectives
    left_of_one = left_behind * grouping.one_of_bucket(ref, wanted, sent) // max(1, bucket)

    others = max(0, grouping.bucket_bytes(ref, wanted, own) - gradient)
    others_results = others * early // whole  # of other regions' gradients, once reduced
    others_left = others
    if memory.micro_batches == 1:  # else their reduced bytes are not counted beside what micro-batches left
        others_left = max(0, others - others * elements * sent // whole)
        others_results = max(0, others - others * elements * sent // whole + others_results) - others_left

    stacked = grouping.bucket_bytes(ref, wanted, own) if pieces_are_copied(memory, ref, storage, wanted) else 0
    handing = bucket + max(stacked, bucket * (result - early) // whole + others_results)
    passing = bucket * max(0, (path.passes - elements) * own - early) // whole

    is_cast = reduction_dtype(memory, ref) != memory.stored_dtype(ref.node)
    landed = max(elements if is_cast else 0, path.arrives, path.passes - elements)
    return {
        "waiting": gradient + early,
        "reduction": max(handing, passing) + later_collectives,
        "left_behind": left_behind,
        "left_of_one": left_of_one,
        "left_of_rest": max(0, left_behind - left_of_one - others_left),
        "reduced": elements * sent,
        "landed": bucket * landed * own // whole,
        "accumulated": gradient // own * sent,
        "others": others_left,
    }
