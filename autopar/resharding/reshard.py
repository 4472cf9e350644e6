"""The cheapest conversion from one layout to another, as a list of steps: pure, shared by cost, solver and runtime.

A step changes one mesh axis. What it does forward (to the value) and backward (to the gradient, from the consumer's
to the one that the producer takes):

========  =====================  =========================
from→to   forward                backward
========  =====================  =========================
R→S       slice                  **all-gather**
R→R+      –                      **all-reduce**
R→P       keep on coordinate 0   –
R+→R      –                      keep on coordinate 0
R+→S      slice                  pad with zeros
R+→P      keep on coordinate 0   keep on coordinate 0
S→R       **all-gather**         slice
S→R+      **all-gather**         **reduce-scatter**
S→S'      **all-to-all**         **all-to-all**
S→P       pad with zeros         slice
P→R       **all-reduce**         –
P→R+      **all-reduce**         **all-reduce**
P→S       **reduce-scatter**     **all-gather**
========  =====================  =========================

Only the bold ones cost anything. A partial value joined by mean can become R or R+ only. One joined by max or min can
become R only and has no gradient: all elements that equal the extremum would share it, and no rank knows all of these.

Of all orders of the steps, the one with the least traffic is taken; among equal ones, the one that sends less over the
first axes of the mesh. Gathering over two axes costs the same in either order, but the axis that is gathered first
moves the smaller pieces. Where every order passes through a layout that the shape does not allow, axes take a detour
over R.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Literal, NamedTuple

from autopar.errors import LayoutError
from autopar.layout import R_PLUS, Layout, Placement, R

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Shape = tuple[int, ...]


class Move(NamedTuple):
    """One collective over one mesh axis.

    `elements`: what one device hands in. This is the shard of an all-gather, the whole tensor of an all-reduce or
    reduce-scatter, the local tensor of an all-to-all. Ragged shards count with their padding, which is sent too.
    """

    kind: CollectiveKind
    axis: int
    elements: int


class Step(NamedTuple):
    """One change of one axis; `forward` and `backward` are None where nothing is sent."""

    axis: int
    src: Placement
    dst: Placement
    layout_before: Layout
    layout_after: Layout
    forward: Move | None
    backward: Move | None


@lru_cache(maxsize=1 << 19)
def steps(src: Layout, dst: Layout, shape: Shape, mesh_shape: Shape, *, needs_grad: bool) -> tuple[Step, ...]:
    """The cheapest steps that turn a tensor of global `shape` from layout `src` into `dst`.

    With `needs_grad=False` there is no gradient, and R+ means R. Raises LayoutError if the shape does not allow a
    layout, or if no steps lead to the wanted value (summands cannot become a partial maximum).

    >>> [step] = steps(Layout.parse("S0"), Layout.parse("R+"), (8, 4), (2,), needs_grad=True)
    >>> step.forward, step.backward
    (Move(kind='all_gather', axis=0, elements=16), Move(kind='reduce_scatter', axis=0, elements=32))
    >>> src, dst = Layout.parse("P,S0"), Layout.parse("S1,R")
    >>> [(s.axis, str(s.layout_after)) for s in steps(src, dst, (8, 4), (2, 2), needs_grad=False)]
    [(0, 'S1,S0'), (1, 'S1,R')]
    """
    if not needs_grad:
        src, dst = src.value(), dst.value()
    for layout in (src, dst):
        if not is_legal(layout, shape, mesh_shape):
            raise LayoutError(
                f"a tensor of shape {shape} cannot have the layout {layout} over a mesh of shape {mesh_shape}"
            )
    axes = [axis for axis in range(len(src)) if src[axis] != dst[axis]]
    if not axes:
        return ()
    path = _cheapest_order(src, dst, axes, shape, mesh_shape, needs_grad)
    path = path or _with_detours(src, dst, shape, mesh_shape, needs_grad)
    if path is None:
        raise LayoutError(f"nothing turns {src} into {dst} (shape {shape}, mesh {mesh_shape})")
    return path


def traffic(steps_: tuple[Step, ...], mesh_shape: Shape, whole: int = 1) -> float:
    """Elements that one device sends in all moves of `steps_`, forward and backward, with ring algorithms; divided by
    `whole`.

    >>> traffic(steps(Layout.parse("P"), Layout.parse("R"), (8,), (4,), needs_grad=True), (4,))
    12.0
    """
    total = 0.0
    for step in steps_:
        n = mesh_shape[step.axis]
        for move in (step.forward, step.backward):
            if move is not None:
                total += move.elements / whole * (n - 1) * ring_share(move.kind, n)
    return total


def ring_share(kind: CollectiveKind, n: int) -> float:
    """The part of the elements handed in that a device sends in each of the n - 1 rounds of a ring; an all-reduce has
    two rings, whose rounds are counted together."""
    return {"all_reduce": 2 / n, "all_gather": 1.0}.get(kind, 1 / n)


def _cheapest_order(
    src: Layout, dst: Layout, axes: list[int], shape: Shape, mesh_shape: Shape, needs_grad: bool
) -> tuple[Step, ...] | None:
    """The order in which `axes` change from `src` to `dst` with the least traffic; None if none is possible.

    Dynamic programming over the set of axes that have changed already, which determines the layout.
    """
    best: dict[int, tuple[float, tuple[Step, ...], Layout]] = {0: (0.0, (), src)}
    for done in range((1 << len(axes)) - 1):
        if done not in best:
            continue
        spent, path, layout = best[done]
        for k, axis in enumerate(axes):
            if done & 1 << k:
                continue
            change = edge(layout, axis, dst[axis], shape, mesh_shape, needs_grad)
            if change is None:
                continue
            step, sent = change
            so_far = best.get(done | 1 << k)
            if so_far is None or spent + sent < so_far[0]:
                best[done | 1 << k] = (spent + sent, (*path, step), step.layout_after)
    last = best.get((1 << len(axes)) - 1)
    return last[1] if last else None


def _with_detours(
    src: Layout, dst: Layout, shape: Shape, mesh_shape: Shape, needs_grad: bool
) -> tuple[Step, ...] | None:
    """The cheapest path over layouts whose axes are each as in `dst`, as in `src`, or replicated: Bellman-Ford by the
    number of steps.

    Among equally cheap paths the shortest is taken. Further ties are decided from the last step backwards: it changes
    the first possible axis, from the first possible placement in this order.
    """
    choices = [
        list(dict.fromkeys((dst[axis], src[axis], R, *((R_PLUS,) if needs_grad else ())))) for axis in range(len(src))
    ]
    places = [{placement: i for i, placement in enumerate(options)} for options in choices]
    spent: dict[Layout, tuple[float, tuple[Step, ...]]] = {src: (0.0, ())}
    best = {src: 0.0}
    cheapest: tuple[Step, ...] | None = None
    while spent:
        then: dict[Layout, tuple[float, tuple[Step, ...]]] = {}
        in_order = sorted(spent, key=lambda layout: [so_far[layout[axis]] for axis, so_far in enumerate(places)])
        for axis, placements in enumerate(choices):
            for layout, placement in itertools.product(in_order, placements):
                change = edge(layout, axis, placement, shape, mesh_shape, needs_grad)
                if change is not None:
                    step, sent = change
                    total, so_far = spent[layout][0] + sent, then.get(step.layout_after)
                    if so_far is None or total < so_far[0]:
                        then[step.layout_after] = total, (*spent[layout][1], step)
        limit = best.get(dst, math.inf)
        spent = {
            options: entry for options, entry in then.items() if entry[0] < min(best.get(options, math.inf), limit)
        }
        best |= {options: total for options, (total, _) in spent.items()}
        cheapest = spent[dst][1] if dst in spent else cheapest
    return cheapest


@lru_cache(maxsize=1 << 18)
def edge(
    before: Layout, axis: int, placement: Placement, shape: Shape, mesh_shape: Shape, needs_grad: bool
) -> tuple[Step, float] | None:
    """The step that gives `axis` another placement, and its cost; None if that is impossible.

    The cost is the traffic divided by the tensor's size, so that shapes which are divided in the same way have the same
    cheapest paths. `before` must be a layout that the shape allows. Cached, since many pairs of layouts share few
    edges.
    """
    if placement == before[axis]:
        return None
    after = before.replace(axis, placement)
    if not is_legal(after, shape, mesh_shape):
        return None
    step = _step(before, after, axis, shape, mesh_shape, needs_grad)
    if step is None:
        return None
    return step, slower(axis, mesh_shape) * traffic((step,), mesh_shape, whole_of(shape))


def whole_of(shape: Shape) -> int:
    """The number of elements; 1 for an empty tensor, because costs are divided by it."""
    return max(math.prod(shape), 1)


def slower(axis: int, mesh_shape: Shape) -> float:
    """A factor on costs that only decides ties: the first axes of a mesh cross slower links, so they cost a bit
    more."""
    return 1 + 1e-9 * (len(mesh_shape) - axis)


@lru_cache(maxsize=1 << 16)
def is_legal(layout: Layout, shape: Shape, mesh_shape: Shape) -> bool:
    return layout.is_legal(shape, mesh_shape, ragged=True)


@lru_cache(maxsize=1 << 16)
def local_elements(layout: Layout, shape: Shape, mesh_shape: Shape) -> int:
    """Elements of the first rank's shard, the largest one."""
    return math.prod(layout.local_shape(shape, mesh_shape))


class Sent(NamedTuple):
    """The collective of a change of an axis of n devices. Each device hands in as many elements as it has before the
    change (or after it, if `after`), times n if `whole`."""

    kind: CollectiveKind
    after: bool = False
    whole: bool = False


@lru_cache(maxsize=1 << 12)
def change(src: Placement, dst: Placement, needs_grad: bool) -> tuple[Sent | None, Sent | None] | None:
    """What changing one axis of several devices sends forward and backward (the table above); None if there is no such
    change."""
    if dst.join != "sum" or (src.join != "sum" and not dst.is_replicated):
        return None
    if src.join in ("max", "min") and (needs_grad or dst.partial_grad):
        return None
    forward = backward = None
    if src.kind == "sharded":
        if dst.kind == "sharded":
            forward, backward = Sent("all_to_all"), Sent("all_to_all", after=True)
        elif dst.kind == "replicated":
            forward = Sent("all_gather")
            backward = Sent("reduce_scatter", whole=True) if dst.partial_grad else None
    elif src.kind == "partial":
        if dst.kind == "sharded":
            forward, backward = Sent("reduce_scatter", after=True, whole=True), Sent("all_gather", after=True)
        else:
            forward = Sent("all_reduce")
            backward = Sent("all_reduce") if dst.partial_grad else None
    elif not src.partial_grad:
        if dst.kind == "sharded":
            backward = Sent("all_gather", after=True)
        elif dst.partial_grad:
            backward = Sent("all_reduce")
    return forward, backward if needs_grad else None


def _step(before: Layout, after: Layout, axis: int, shape: Shape, mesh_shape: Shape, needs_grad: bool) -> Step | None:
    """The change of `axis` from `before` to `after` as a step; None if the table has no such change."""
    sends = change(before[axis], after[axis], needs_grad)
    if sends is None:
        return None
    n = mesh_shape[axis]
    sizes = local_elements(before, shape, mesh_shape), local_elements(after, shape, mesh_shape)
    forward, backward = (
        None if sent is None or n == 1 else Move(sent.kind, axis, sizes[sent.after] * (n if sent.whole else 1))
        for sent in sends
    )
    return Step(axis, before[axis], after[axis], before, after, forward, backward)
