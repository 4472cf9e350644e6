"""What converting a tensor from one layout into another costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.all_paths import all_paths
from autopar.cluster import Cluster
from autopar.cost.buckets import Grouping
from autopar.cost.collectives import collective_seconds, copies_seconds
from autopar.errors import LayoutError
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.reshard import Move, Step, steps

Row = Mapping[Layout, "Price | None"]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of one conversion, forward and backward, and how many collectives it is."""

    forward: float
    backward: float
    collectives: int


@dataclass
class PriceTable:
    """What conversions of one tensor cost, looked up once for each pair of layouts.

    `grouping`: given for a parameter, which shares collectives with others.
    """

    ref: TensorRef
    cluster: Cluster
    itemsize: int
    gradient_itemsize: int
    needs_grad: bool
    grouping: Grouping | None = None
    known: dict[Layout, dict[Layout, Price | None]] = field(default_factory=dict)

    def __call__(self, source: Layout, wanted: Layout) -> Price | None:
        """None where the conversion is impossible."""
        row = self.known.setdefault(source, {})
        if wanted not in row:
            row[wanted] = self._price(source, wanted)
        return row[wanted]

    def rows(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> list[Row]:
        """The prices from each of some layouts into at least all of others, worked out together."""
        missing = [s for s in sources if not self.known.get(s, {}).keys() >= set(wanted)]
        if missing and wanted:
            self._fill(missing, wanted)
        return [self.known[source] for source in sources]

    def _fill(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> None:
        shape = tuple(tensor_of(self.ref).shape)
        paths = all_paths(sources, wanted, shape, self.cluster.shape, needs_grad=self.needs_grad)
        forward = np.array([self._parts(step.forward, self.itemsize) for step in paths.steps] + [(0.0, 0.0)])
        backward = np.array([self._parts(step.backward, self.gradient_itemsize) for step in paths.steps] + [(0.0, 0.0)])
        live = np.array([self._live(step) for step in paths.steps] + [0])
        calls = np.array([self._calls(layout) for layout in wanted])

        def seconds(parts: Any) -> list[list[float]]:
            fixed, moving = parts[paths.numbers].sum(axis=2).transpose(2, 0, 1)
            return (calls * fixed + moving).tolist()

        there, back, counts = seconds(forward), seconds(backward), live[paths.numbers].sum(axis=2).tolist()
        for i, source in enumerate(sources):
            row = self.known.setdefault(source, {})
            for j, layout in enumerate(wanted):
                if layout not in row:
                    found = paths.found[i, j]
                    row[layout] = Price(there[i][j], back[i][j], counts[i][j]) if found else self._price(source, layout)

    def _price(self, source: Layout, wanted: Layout) -> Price | None:
        shape = tuple(tensor_of(self.ref).shape)
        try:
            path = steps(source, wanted, shape, self.cluster.shape, needs_grad=self.needs_grad)
        except LayoutError:
            return None
        calls = self._calls(wanted)

        def seconds(moves: Sequence[Move | None], itemsize: int) -> float:
            return sum(calls * fixed + moving for fixed, moving in (self._parts(move, itemsize) for move in moves))

        forward = seconds([step.forward for step in path], self.itemsize)
        backward = seconds([step.backward for step in path], self.gradient_itemsize)
        return Price(forward, backward, sum(map(self._live, path)))

    def _calls(self, wanted: Layout) -> float:
        return 1.0 if self.grouping is None else self.grouping.calls(self.ref, wanted)

    def _parts(self, move: Move | None, itemsize: int) -> tuple[float, float]:
        """Seconds of a collective that do not depend on its bytes, and those that do."""
        if move is None:
            return 0.0, 0.0
        axis = self.cluster.axes[move.axis]
        fixed, size = collective_seconds(move.kind, 0, axis), move.elements * itemsize
        moving = collective_seconds(move.kind, size, axis, 0.0)
        if self.grouping is not None:
            moving += copies_seconds(move.kind, size, axis, self.cluster.device)
        return fixed, moving

    def _live(self, step: Step) -> int:
        moves = [move for move in (step.forward, step.backward) if move is not None]
        return len(moves) if self.cluster.axes[step.axis].size > 1 else 0
