"""What parameters and their gradients take on their way: copies gathered again, gradients that wait, buffers.

Of a parameter, as one use in backward wants it (`cost.buckets.buckets`: b bytes of its bucket):

=============  ==================================================================================================
gathered       b for a parameter that is gathered again, while the ops of its region run backward
arriving       b of a bucket behind that one, which arrives meanwhile, and what its last collective was handed; more
               where a slice is made of what came
landing        2 b once it has arrived: what came, in the order of the ranks, and the parameters that are made of it; or
               twice what came
begun          where that takes several collectives: what all but the last leave of the next bucket behind
waiting        its own gradient, as the op gives it, until those of its bucket are there; and what is made of it, if
               that is no smaller (all-to-all, all-gather): the bucket may be handed in at any op behind
cast           where it moves nowhere, as the op gives it, beside the same in another dtype in which it is stored
reduction      once they are: b more, the buffer that is handed in, and the result where it is another tensor, of
               other regions in the bucket too; or what is there while the next collective of the bucket behind begins,
               if that is more; and half of b, where collectives behind the first hand in what is not their result: so
               much they may hold
left behind    b until the next bucket's turn, where what comes out is not what was handed in (reduce-scatter); what
               comes of it, if it goes on; and half of b, as above
left of one    the same of one block's part of a bucket of several, which recompute divides
left of rest   the same of all other blocks' part, where one of them is recomputed alone, beyond what is in `others`
reduced        its gradient as it is stored, in the dtype in which it travelled, until the end of backward
landed         at the end of backward: b of its bucket, reduced, while that is cast to the dtype of the parameters, or
               while gradients are made of what came (all-to-all, all-gather), or its last collective begins
accumulated    what micro-batches before leave: unreduced where it moves
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
"""Elements of a collective's result, where it is another tensor than what was handed in, by the elements of that and
the number of ranks: of numbers, or of arrays of them."""
IN_ANOTHER_ORDER: tuple[CollectiveKind, ...] = ("all_gather", "all_to_all")
"""Those whose result is by ranks, so that tensors are made of it."""


@dataclass(frozen=True, slots=True)
class Moving:
    """Bytes of one parameter for one wanted layout; see the head of this file. `others`: what gradients of other
    regions in its bucket take beyond what they take once reduced, with several micro-batches beyond nothing.
    `alone`: by how much all of these are more where it is a bucket by itself."""

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
    """Bytes of a kind that the largest bucket of a region's parameters has: all of them, as they are taken to have of
    one, or one parameter by itself. `together`: of the buckets that have several."""
    sizes = [(getattr(one, kind), one.alone) for one in some]
    alone = [0 if together else round(size * more) for size, more in sizes]
    return max(sum(size for size, _ in sizes), *alone, 0)


class Way(NamedTuple):
    """Of the collectives that turn a parameter from its storage into what an op wants, and its gradient back; numbers
    of elements, over axes of several devices.

    `further`: what all forward ones but the first hand in; `last`: what the last one does, and `came`: what it gives,
    more than is wanted where a slice follows; `reduces`: whether any run backward; `result`: what the first of these
    gives, where it is not what was handed in; `scatters`: whether any is no all-reduce; `scatters_later`: any behind
    the first; `arrives`: what the last one gives, where the gradient is made of that; `passes`: the most that is there
    when one has arrived and the next begins, 0 of a single one.
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
    """Of a parameter stored as `storage` that an op reads as `wanted`; equal ones of equal blocks are told once.

    `way`: where it is known already.
    """
    key = grouping.form(ref), storage, wanted, regather
    found = grouping.moved.get(key)
    if found is None:
        way = way or way_between(memory, ref, storage, wanted)
        found = grouping.moved[key] = _moving(memory, grouping, ref, storage, wanted, way, regather=regather)
    return found


def replayed(memory: StepMemory, grouping: Grouping, ref: TensorRef, storage: Layout, wanted: Layout) -> Moving:
    """What moves for a replay, of a parameter that is not gathered again otherwise: what is on its way, if anything is,
    for copies count with the ops that keep them.

    A replayed block's bucket is of its own parameters. Where blocks share one otherwise, that of the block before is
    under way meanwhile, and counts as what is `gathered`: their regions have no other on its way.
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
    more = max(0, result - elements * own) if way.passes else 0  # of what comes next
    left = (bucket if way.scatters else 0) + bucket * more // max(1, whole) + held
    left_of_one = left * grouping.one_of_bucket(ref, wanted, travels) // max(1, bucket)
    is_cast = reduction_dtype(memory, ref) != memory.stored_dtype(ref.node)
    made = others * early // max(1, whole)  # of the others, once theirs are handed in
    if memory.micro_batches == 1:  # else, what they are reduced to is not counted beside what micro-batches left
        others -= others * elements * travels // max(1, whole)
        others, made = max(0, others), max(0, others + made) - max(0, others)
    handing = bucket + bucket * (result - early) // max(1, whole) + made
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
