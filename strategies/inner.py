"""What local code sends inside an op: collectives that are part of a strategy and not of any edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autopar.layout import Layout
from autopar.strategies.bind import Bound
from autopar.strategies.strategy import InnerCollective

if TYPE_CHECKING:
    from autopar.strategies.modes import TensorFact

_FLOAT32 = 4  # statistics are exchanged in float32
Facts = Sequence["TensorFact"]


def inner_collectives(
    local: str, bound: Bound, facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]
) -> tuple[InnerCollective, ...]:
    """The collectives of local code `local`, axis by axis; most local code has none."""
    find = _INNER.get(local)
    return find(facts, layouts, mesh_shape) if find else ()


def _cross_entropy(facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]) -> tuple[InnerCollective, ...]:
    """Over axes that split the classes: the maximum, then sum of exponentials and target logit, a number a row each.
    Over axes that split the rows: the count of labels that are not ignored."""
    logits, classes = facts[0], 1 if len(facts[0].shape) > 1 else 0
    local = layouts[0].local_shape(logits.shape, mesh_shape)
    rows = 1
    for dim, length in enumerate(local):
        rows *= length if dim != classes else 1
    found = []
    for axis, placement in enumerate(layouts[0].placements):
        if placement.is_sharded and placement.dim == classes:
            found.append(InnerCollective("all_reduce", axis, rows * _FLOAT32, 0))
            found.append(InnerCollective("all_reduce", axis, 2 * rows * _FLOAT32, 0))
        elif placement.is_sharded:
            found.append(InnerCollective("all_reduce", axis, _FLOAT32, 0))
    return tuple(found)


def _batch_norm(facts: Facts, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]) -> tuple[InnerCollective, ...]:
    """Over axes that split the batch: sum, sum of squares and count forward; two sums a channel backward."""
    channels = layouts[0].local_shape(facts[0].shape, mesh_shape)[1]
    forward, backward = (2 * channels + 1) * _FLOAT32, 2 * channels * _FLOAT32 if facts[0].grad else 0
    return tuple(
        InnerCollective("all_reduce", axis, forward, backward)
        for axis, p in enumerate(layouts[0].placements)
        if p.is_sharded and p.dim != 1
    )


_INNER: dict[str, Callable[[Facts, Sequence[Layout], tuple[int, ...]], tuple[InnerCollective, ...]]] = {
    "cross_entropy": _cross_entropy,
    "batch_norm": _batch_norm,
}
