"""Collectives that local code runs inside an op: they belong to a strategy, and to no conversion between ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopar.layout import Layout
from autopar.strategies.bind import Bound
from autopar.strategies.strategy import InnerCollective

if TYPE_CHECKING:
    from autopar.strategies.modes import TensorFact

Facts = Sequence["TensorFact"]


def inner_collectives(
    local: str, bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """The collectives that the local code named `local` runs, axis by axis; most local code runs none."""
    find = _INNER.get(local)
    return find(bound, facts, layouts, mesh_shape) if find else ()


def _cross_entropy(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the classes reduce the maximum, then the sum of exponentials and the target's logit: one number
    for each row. With class weights, or with distributions as labels, the sum of the weights is a third number.

    `nll_loss` exchanges none of these, since the ranks' losses are summands. A mean also needs the number of labels
    that are not ignored, or the sum of their classes' weights: a scalar, reduced over axes that split the rows, and
    with class weights also over axes that split the classes.
    """
    logits, target, *weight = facts[: bound.inputs]
    classes = 1 if len(logits.shape) > 1 else 0
    summed = any(f.name == "v" and "whole" in f.note.words for f in bound.factors)
    mean = any(f.name != "v" and f.note.local for f in bound.factors)
    counts, width = mean and not target.floating, _wide(logits)
    rows = _rows(logits, classes, layouts[0], mesh_shape)
    collectives = []
    for axis, placement in enumerate(layouts[0].placements):
        splits_classes = placement.is_sharded and placement.dim == classes
        if splits_classes and summed:
            numbers = 3 if weight or target.floating else 2
            collectives.append(InnerCollective("all_reduce", axis, rows * width, 0))
            collectives.append(InnerCollective("all_reduce", axis, numbers * rows * width, 0))
        if counts and placement.is_sharded and (weight or not splits_classes):
            collectives.append(InnerCollective("all_reduce", axis, width, 0))
    return tuple(collectives)


def _log_softmax(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the dim reduce, with one number for each row: the maximum, the sum of exponentials, and in
    backward that sum's gradient."""
    dim = next(spot.dim for f, spot in zip(bound.factors, bound.spots[0], strict=True) if spot and f.note.local)
    rows = _rows(facts[0], dim, layouts[0], mesh_shape) * max(_wide(facts[0]), facts[-1].item_bytes)
    back = rows if facts[0].grad else 0
    axes = [axis for axis, p in enumerate(layouts[0].placements) if p.is_sharded and p.dim == dim]
    return tuple(
        InnerCollective("all_reduce", axis, rows, backward_bytes) for axis in axes for backward_bytes in (0, back)
    )


def _extremum(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split a reduced dim reduce the extremum, and in backward the number of elements that equal it."""
    operand, result = facts[0], facts[-1]
    numbers = math.prod(layouts[-1].local_shape(result.shape, mesh_shape))
    back = numbers * _wide(result) if operand.grad else 0
    placements = zip(layouts[0].placements, layouts[-1].placements, strict=True)
    axes = [axis for axis, (p, out) in enumerate(placements) if p.is_sharded and not out.is_sharded]
    sizes = ((numbers * result.item_bytes, 0), (0, back))
    return tuple(InnerCollective("all_reduce", axis, *size) for axis in axes for size in sizes)


def _rows(fact: TensorFact, dim: int, layout: Layout, mesh_shape: tuple[int, ...]) -> int:
    """How many rows along `dim` one device holds: the product of all other local lengths."""
    local = layout.local_shape(fact.shape, mesh_shape)
    return math.prod(length for d, length in enumerate(local) if d != dim)


def _batch_norm(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the batch reduce two moments of each channel in float64, and in backward two sums of each."""
    channels = layouts[0].local_shape(facts[0].shape, mesh_shape)[1]
    axes = [axis for axis, p in enumerate(layouts[0].placements) if p.is_sharded and p.dim != 1]
    collectives = [InnerCollective("all_reduce", axis, 2 * 8 * channels, 0) for axis in axes]
    if facts[0].grad:
        collectives += [InnerCollective("all_reduce", axis, 0, 2 * _wide(facts[0]) * channels) for axis in axes]
    return tuple(collectives)


def _instance_norm(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the batch reduce two running statistics of each channel in float64."""
    channels = facts[0].shape[1]
    axes = [axis for axis, p in enumerate(layouts[0].placements) if p.is_sharded and p.dim == 0]
    return tuple(InnerCollective("all_reduce", axis, 2 * 8 * channels, 0) for axis in axes)


def _exchanged(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Tokens are sent to the ranks of their experts and back; the sizes assume that all experts get equally many.

    The numbers of tokens, their experts and their weights are sent first. Gradients of weights and tokens are sent the
    opposite way. Over several axes, all this is done for one axis after another.
    """
    hidden, index, weights = facts[:3]
    placements = zip(layouts[0].placements, layouts[3].placements, strict=True)
    axes = [axis for axis, (tokens, experts) in enumerate(placements) if tokens.is_sharded and experts.is_sharded]
    routes = math.prod(layouts[1].local_shape(index.shape, mesh_shape))
    rows, weight = routes * hidden.shape[1] * hidden.item_bytes, routes * weights.item_bytes
    collectives: list[InnerCollective] = []
    for axis in axes:
        collectives += (
            InnerCollective("all_to_all", axis, 8 * mesh_shape[axis], 0),
            InnerCollective("all_to_all", axis, 8 * routes, 0),
            InnerCollective("all_to_all", axis, weight, weight if weights.grad else 0),
            InnerCollective("all_to_all", axis, rows, rows if hidden.grad else 0),
            InnerCollective("all_to_all", axis, rows, rows if any(f.grad for f in facts) else 0),
        )
    return tuple(collectives)


def _routed(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the tokens reduce, in backward, one flag (a byte) for each weight: whether it has a gradient."""
    learned = sum(fact.grad for fact in facts[3 : bound.inputs])
    axes = [axis for axis, p in enumerate(layouts[0].placements) if p.is_sharded]
    return tuple(InnerCollective("all_reduce", axis, 0, learned) for axis in axes if learned)


def _swapped(
    bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """Axes that split the queries: a rank sends half of its queries to one other rank, which sends the results back.
    Backward sends the same again and half of the results' gradients, and gets half of the queries' gradients back."""
    query, result, dim = facts[0], facts[-1], 2
    local = layouts[0].local_shape(query.shape, mesh_shape)
    half = math.prod(local) // local[dim] * (local[dim] // 2) * query.item_bytes
    collectives = []
    for axis, (placement, n) in enumerate(zip(layouts[0].placements, mesh_shape, strict=True)):
        if half and n > 1 and placement.is_sharded and placement.dim == dim:
            # Priced as an all-to-all among all n ranks, which sends (n - 1) / n of the bytes that it is handed.
            single, triple = (-(-halves * half * n // (n - 1)) for halves in (1, 3))
            back = (triple, single) if result.grad else (0, 0)
            collectives += [InnerCollective("all_to_all", axis, single, backward_bytes) for backward_bytes in back]
    return tuple(collectives)


def _wide(fact: TensorFact) -> int:
    """Bytes of one statistic: statistics are reduced in float32, or in the tensor's dtype if that is wider."""
    return max(4, fact.item_bytes)


_INNER: dict[str, Callable[[Bound, Facts, Sequence[Layout], tuple[int, ...]], tuple[InnerCollective, ...]]] = {
    "cross_entropy": _cross_entropy,
    "log_softmax": _log_softmax,
    "extremum": _extremum,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "experts_exchanged": _exchanged,
    "routed": _routed,
    "routed_drawn": _routed,
    "sdpa_causal": _swapped,
}
