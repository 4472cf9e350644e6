"""Which buckets the conversions of a parameter use, and which part of a bucket each accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.buckets.grouping import Grouping
from autopar.cost.buckets.latency import base_of, move_number
from autopar.graph import TensorRef
from autopar.layout import Layout
from autopar.resharding.all_paths import Paths
from autopar.resharding.path_edges import Sends
from autopar.solver.linear.terms import Array


@dataclass(frozen=True, slots=True)
class Shares:
    """Figures of conversions by source and wanted layout, as in `cost.buckets.latency`.

    `gathers`, `reductions`: the number of the way (0 if nothing moves or the parameter is a whole bucket itself);
    `parts`: the part of a bucket; `asks`: whether the conversion needs a bucket of its block.
    """

    gathers: Array
    reductions: Array
    parts: Array
    asks: Array

    def at(self, rows: Array, columns: Array) -> Shares:
        """The shares of some rows and columns."""
        kinds = self.gathers, self.reductions, self.parts, self.asks
        return Shares(*(kind[rows[:, None], columns] for kind in kinds))


def shares_of(
    paths: Paths, ref: TensorRef, wanted: Sequence[Layout], grouping: Grouping, mesh_shape: Sequence[int]
) -> Shares:
    """The shares of a parameter's conversions."""
    gathers = _ways(paths, paths.forward, mesh_shape)
    reductions = _ways(paths, paths.backward, mesh_shape, back=True)
    parts = np.array([grouping.calls(ref, layout) for layout in wanted])
    alone = parts >= 1
    tiny = np.array([grouping.is_tiny(ref, layout) for layout in wanted], dtype=bool)
    asks = (gathers > 0) | ~tiny
    parts = np.broadcast_to(parts, gathers.shape)
    return Shares(np.where(alone, 0, gathers), np.where(alone, 0, reductions), parts, asks)


def _ways(paths: Paths, sends: Sends, mesh_shape: Sequence[int], *, back: bool = False) -> Array:
    """By source and wanted layout, the number of the way; backward takes the steps in reverse order."""
    several = (np.array(mesh_shape) > 1)[paths.axis]
    digits = np.append(np.where(several & (sends.kind >= 0), move_number(sends.kind, paths.axis), 0), 0)
    base, numbers = base_of(len(mesh_shape)), np.zeros(paths.numbers.shape[:2], dtype=np.int64)
    steps = np.moveaxis(paths.numbers, 2, 0)
    for step in steps[::-1] if back else steps:
        each = digits[step]
        numbers = np.where(each > 0, numbers * base + each, numbers)
    return numbers
