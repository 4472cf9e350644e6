"""Staging memory of conversions for many pairs of layouts at once: `resharding.staging.staged_elements` of each."""

from __future__ import annotations

import numpy as np

from autopar.resharding.all_paths import Paths
from autopar.resharding.path_edges import KINDS, Sends
from autopar.resharding.reshard import CollectiveKind, Shape
from autopar.resharding.staging import Order, held
from autopar.solver.linear.terms import Array


def staged_of_paths(
    paths: Paths, shape: Shape, mesh_shape: Shape, order: Order
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """For forward and for backward, by source and wanted layout: staged elements, and whether a new tensor is made."""
    ends = paths.edges.ends(paths.used)
    staged_of_passes = []
    for backward, sends in enumerate((paths.forward, paths.backward)):
        of_step = np.zeros((len(ends) + 1, 4), dtype=np.int64)  # the last one, index -1, stands for no step
        for i, ((axis, *layouts), kind) in enumerate(zip(ends, _kinds(sends), strict=True)):
            of_step[i] = held(
                *layouts[:: -1 if backward else 1], axis, kind, shape, mesh_shape, order, backward=bool(backward)
            )
        steps = np.moveaxis(paths.numbers, 2, 0)
        staged_of_passes.append(_most_beside(of_step, steps[::-1] if backward else steps))
    return staged_of_passes[0], staged_of_passes[1]


def _kinds(sends: Sends) -> list[CollectiveKind | None]:
    return [KINDS[kind] if kind >= 0 else None for kind in sends.kind.tolist()]


def _most_beside(of_step: Array, steps: Array) -> tuple[Array, Array]:
    """The most elements that any step of a path holds, besides the path's input and its result; and whether any step
    makes a new tensor."""
    most, last = (np.zeros(steps.shape[1:], dtype=np.int64) for _ in range(2))
    begun = np.zeros(steps.shape[1:], dtype=bool)
    for step in steps:
        input_elements, staged, result, is_other = np.moveaxis(of_step[step], -1, 0)
        changes = is_other > 0
        np.maximum(most, np.where(changes, begun * input_elements + staged + result, 0), out=most)
        last[changes] = result[changes]
        begun |= changes
    return np.maximum(0, most - last), begun
