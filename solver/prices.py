"""What converting a tensor from one layout into another costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.all_paths import all_paths
from autopar.cluster import Cluster
from autopar.cost.buckets import Grouping
from autopar.cost.collectives import collective_seconds, copies_seconds
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.reshard import Move, Step
from autopar.solver.linear import Array


@dataclass(frozen=True, slots=True)
class Prices:
    """Of conversions from each of some layouts (rows) into each of others (columns).

    Seconds forward and backward, and how many collectives these are; `possible`: whether there is a way.
    """

    forward: Array
    backward: Array
    forward_collectives: Array
    backward_collectives: Array
    possible: Array

    def at(self, rows: Array, columns: Array) -> Prices:
        """Those of some layouts."""
        at = np.ix_(rows, columns)
        kinds = self.forward, self.backward, self.forward_collectives, self.backward_collectives, self.possible
        return Prices(*(kind[at] for kind in kinds))


@dataclass
class PriceTable:
    """What conversions of tensors of one form cost, worked out together for all layouts that they have.

    `grouping`: given for a parameter, which shares collectives with others.
    """

    ref: TensorRef
    cluster: Cluster
    itemsize: int
    gradient_itemsize: int
    needs_grad: bool
    grouping: Grouping | None = None
    sources: dict[Layout, int] = field(default_factory=dict)
    wanted: dict[Layout, int] = field(default_factory=dict)
    _prices: Prices | None = None

    def expect(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> None:
        """Say which prices will be asked for: those that are said before the first question are cheapest."""
        for known, some in ((self.sources, sources), (self.wanted, wanted)):
            for layout in some:
                if layout not in known:
                    known[layout] = len(known)
                    self._prices = None

    def prices(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> Prices:
        """The prices from each of some layouts into each of others."""
        self.expect(sources, wanted)
        if self._prices is None:
            self._prices = self._all(list(self.sources), list(self.wanted))
        rows = np.array([self.sources[layout] for layout in sources], dtype=np.int64)
        return self._prices.at(rows, np.array([self.wanted[layout] for layout in wanted], dtype=np.int64))

    def _all(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> Prices:
        shape = tuple(tensor_of(self.ref).shape)
        paths = all_paths(sources, wanted, shape, self.cluster.shape, needs_grad=self.needs_grad)
        calls = np.array([1.0 if self.grouping is None else self.grouping.calls(self.ref, w) for w in wanted])
        each = np.array([*(self._step(step) for step in paths.steps), (0.0,) * 6])  # at -1: no step
        totals = each[paths.numbers].sum(axis=2)
        fixed, moving, forward_live, back_fixed, back_moving, back_live = np.moveaxis(totals, 2, 0)
        return Prices(
            calls * fixed + moving,
            calls * back_fixed + back_moving,
            forward_live.astype(np.int64),
            back_live.astype(np.int64),
            paths.found,
        )

    def _step(self, step: Step) -> tuple[float, ...]:
        """What `_parts` says of the collectives of a step, forward and backward."""
        return *self._parts(step.forward, self.itemsize), *self._parts(step.backward, self.gradient_itemsize)

    def _parts(self, move: Move | None, itemsize: int) -> tuple[float, float, float]:
        """Seconds of a collective that do not depend on its bytes, those that do, and whether there is any."""
        if move is None:
            return 0.0, 0.0, 0.0
        axis = self.cluster.axes[move.axis]
        fixed, size = collective_seconds(move.kind, 0, axis), move.elements * itemsize
        moving = collective_seconds(move.kind, size, axis, 0.0)
        if self.grouping is not None:
            moving += copies_seconds(move.kind, size, axis, self.cluster.device)
        return fixed, moving, float(axis.size > 1)
