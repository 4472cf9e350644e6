"""Bytes of parameters and gradients on their way: copies gathered again, gradients that wait, buffers of collectives.

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.reductions import HELD
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.piece_copies import pieces_are_copied
from autopar.cost.traffic import conversion_moves, needs_grad, reduction_dtype
from autopar.graph import TensorRef, tensor_of
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


@dataclass(frozen=True, slots=True)
class Moving:
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


def largest(some: Iterable[Moving], kind: str, *, together: bool = False) -> int:
    """Bytes of a kind (a field of `Moving`) of the largest bucket of a region's parameters: that of all of them, each
    with its charged part, or of one parameter alone. `together`: only buckets of several parameters."""
    sizes = [(getattr(one, kind), one.alone) for one in some]
    alone = [0 if together else round(size * more) for size, more in sizes]
    return max(sum(size for size, _ in sizes), *alone, 0)


class Way(NamedTuple):
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
    """The bytes of a parameter stored as `storage` that an op reads as `wanted`, cached for equal blocks.

    `way`: its collectives, if known already.
    """
    key = grouping.form(ref), storage, wanted, regather
    found = grouping.moved.get(key)
    if found is None:
        way = way or way_between(memory, ref, storage, wanted)
        found = grouping.moved[key] = _moving(memory, grouping, ref, storage, wanted, way, regather=regather)
    return found


def replayed(memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout) -> Moving:
    """What moves for a replay that gathers a parameter whose copy the plan keeps: only what is on its way, since copies
    count with the ops that keep them.

    A replayed block's bucket holds its own parameters alone. Where blocks otherwise share a bucket, that of the block
    before is on its way meanwhile; it counts as `gathered`, since no other bucket is on its way in these regions.
    """
    way, whole = way_between(memory, ref, storage, wanted), memory.local_bytes(ref, wanted)
    if not way.last or not whole:
        return Moving()
    own = tensor_of(ref).dtype.itemsize
    one = grouping.one_of_bucket(ref, wanted, own)
    came = one * max(way.came * own, whole) // whole
    arriving = came + one * way.last * own // whole
    shared = grouping.bucket_bytes(ref, wanted, own) > one
    begun = one * way.further * own // whole
    return Moving(arriving if shared else 0, arriving, came, begun, alone=grouping.alone(ref, wanted))


def way_between(memory: StepMemory, ref: TensorRef, storage: Layout, wanted: Layout) -> Way:
    mesh = memory.mesh_shape
    both = conversion_moves(ref, storage, wanted, mesh, needs_grad=needs_grad(memory, ref))
    gathers, moves = ([move for move in some if mesh[move.axis] > 1] for some in both)
    handed = [move.elements for move in gathers] or [0]
    came, results = ([RESULT[m.kind](m.elements, mesh[m.axis]) for m in some] or [0] for some in (gathers, moves))
    scatters = [move.kind != "all_reduce" for move in moves]
    passes = [0]
    for one, its, then, result in zip(moves, results, moves[1:], results[1:], strict=False):
        there = its or one.elements
        passes += there * (1 + (one.kind in IN_ANOTHER_ORDER)), there + then.elements, then.elements + result
    arrives = results[-1] if moves and moves[-1].kind in IN_ANOTHER_ORDER else 0
    return Way(
        sum(handed[1:]),
        handed[-1],
        came[-1],
        bool(moves),
        results[0],
        any(scatters),
        any(scatters[1:]),
        arrives,
        max(passes),
    )


def _moving(
    memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout, way: Way, *, regather: bool
) -> Moving:
    own = tensor_of(ref).dtype.itemsize
    gathered = arriving = landing = begun = 0
    whole = memory.local_bytes(ref, wanted)
    copied = memory.read_bytes(ref.node, storage, wanted) if not memory.train else 0
    if (regather and memory.read_bytes(ref.node, storage, wanted)) or (copied and way.last):
        gathered = grouping.bucket_bytes(ref, wanted, own)
        begun = gathered * way.further * own // max(1, whole)
        came = gathered * max(way.came * own, whole) // max(1, whole)
        arriving = came + gathered * way.last * own // max(1, whole)
        landing = 2 * came if way.last else gathered
    alone = grouping.alone(ref, wanted)
    if not memory.is_trainable(ref.node):
        return Moving(gathered, arriving, landing, begun, copied=copied, alone=alone)
    if not way.reduces:
        stored = memory.gradient_bytes(ref.node, storage)
        waiting = max(whole, stored)
        cast = whole if memory.stored_dtype(ref.node) != tensor_of(ref).dtype else 0
        return Moving(
            gathered=gathered,
            arriving=arriving,
            landing=landing,
            begun=begun,
            waiting=waiting,
            cast=cast,
            reduced=stored,
            accumulated=stored,
            alone=alone,
        )
    travels = reduction_dtype(memory, ref).itemsize
    elements = memory.local_bytes(ref, storage) // own
    bucket = grouping.bucket_bytes(ref, wanted, travels)
    others = max(0, grouping.bucket_bytes(ref, wanted, own) - whole)
    held = bucket // HELD if way.scatters_later else 0
    result = way.result * own
    early = result if result >= whole else 0
    more = max(0, result - elements * own) if way.passes else 0  # the next collective's input beyond the result
    left = (bucket if way.scatters else 0) + bucket * more // max(1, whole) + held
    left_of_one = left * grouping.one_of_bucket(ref, wanted, travels) // max(1, bucket)
    is_cast = reduction_dtype(memory, ref) != memory.stored_dtype(ref.node)
    made = others * early // max(1, whole)  # results of other regions' gradients, once reduced
    if memory.micro_batches == 1:  # else their reduced bytes are not counted beside what micro-batches left
        others -= others * elements * travels // max(1, whole)
        others, made = max(0, others), max(0, others + made) - max(0, others)
    stacked = grouping.bucket_bytes(ref, wanted, own) if pieces_are_copied(memory, ref, storage, wanted) else 0
    handing = bucket + max(stacked, bucket * (result - early) // max(1, whole) + made)
    passing = bucket * max(0, (way.passes - elements) * own - early) // max(1, whole)
    return Moving(
        gathered=gathered,
        arriving=arriving,
        landing=landing,
        begun=begun,
        waiting=whole + early,
        reduction=max(handing, passing) + held,
        left_behind=left,
        left_of_one=left_of_one,
        left_of_rest=max(0, left - left_of_one - others),
        reduced=elements * travels,
        landed=bucket * max(elements if is_cast else 0, way.arrives, way.passes - elements) * own // max(1, whole),
        accumulated=whole // own * travels,
        others=others,
        alone=alone,
    )
