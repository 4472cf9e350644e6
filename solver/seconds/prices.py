"""The seconds, collectives and staging memory of converting a tensor from one layout into another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.cluster import Axis, Cluster
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.collectives import collective_seconds, copies_seconds, member_seconds
from autopar.cost.memory.transfer_path import IN_ANOTHER_ORDER, RESULT, TransferPath
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.resharding.all_paths import KnownRoutes, Paths, all_paths
from autopar.resharding.path_edges import KINDS, Sends
from autopar.resharding.reshard import CollectiveKind
from autopar.resharding.staging import Order
from autopar.solver.linear.terms import Array
from autopar.solver.seconds.shares import Shares, shares_of
from autopar.solver.seconds.staged import staged_of_paths


@dataclass(frozen=True, slots=True)
class Prices:
    """Conversions from each of some layouts (rows) into each of others (columns).

    `forward`, `backward`: seconds, with a leading dim that is the mesh axis for parameters and has size 1 otherwise;
    `..._collectives`: numbers of collectives; `possible`: whether there is a path; `shares`: for a parameter, its parts
    of buckets.
    """

    forward: Array
    backward: Array
    forward_collectives: Array
    backward_collectives: Array
    possible: Array
    shares: Shares | None = None

    def at(self, rows: Array, columns: Array) -> Prices:
        """The prices of some rows and columns."""
        at = rows[:, None], columns
        return Prices(
            self.forward[(slice(None), *at)],
            self.backward[(slice(None), *at)],
            self.forward_collectives[at],
            self.backward_collectives[at],
            self.possible[at],
            None if self.shares is None else self.shares.at(rows, columns),
        )


@dataclass
class PriceTable:
    """The prices of conversions of equal tensors, computed together for all layouts that occur.

    `grouping`: given for a parameter, which shares collectives with other parameters. `order`: the order of dims in
    memory. `routes`: a cache of routes between layouts, shared with other tables.
    """

    ref: TensorRef
    cluster: Cluster
    itemsize: int
    gradient_itemsize: int
    needs_grad: bool
    grouping: Grouping | None = None
    order: Order = ()
    routes: KnownRoutes = field(default_factory=dict)
    sources: dict[Layout, int] = field(default_factory=dict)
    wanted: dict[Layout, int] = field(default_factory=dict)
    _prices: Prices | None = None
    _paths: Paths | None = None
    _transfer_paths: tuple[Array, ...] | None = None
    _staged: tuple[tuple[Array, Array], tuple[Array, Array]] | None = None

    def expect(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> None:
        """Announce layouts whose prices will be asked for: layouts announced later make the table be computed anew."""
        for numbers, layouts in ((self.sources, sources), (self.wanted, wanted)):
            for layout in layouts:
                if layout not in numbers:
                    numbers[layout] = len(numbers)
                    self._prices = None

    def prices(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> Prices:
        """The prices from each of `sources` into each of `wanted`."""
        self.expect(sources, wanted)
        if self._prices is None:
            self._prices = self._all(list(self.sources), list(self.wanted))
        rows = np.array([self.sources[layout] for layout in sources], dtype=np.int64)
        return self._prices.at(rows, np.array([self.wanted[layout] for layout in wanted], dtype=np.int64))

    def transfer_paths(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> list[list[TransferPath]]:
        """The collectives of these conversions, by source and wanted layout."""
        self.prices(sources, wanted)
        assert self._paths is not None
        if self._transfer_paths is None:
            self._transfer_paths = self._all_transfer_paths(self._paths)
        rows = np.array([self.sources[layout] for layout in sources], dtype=np.int64)
        at = np.ix_(rows, np.array([self.wanted[layout] for layout in wanted], dtype=np.int64))
        grids = zip(*(grid[at].tolist() for grid in self._transfer_paths), strict=True)
        return [[TransferPath(*fields) for fields in zip(*row, strict=True)] for row in grids]

    def staged_bytes(self, sources: Sequence[Layout], wanted: Sequence[Layout], *, backward: bool) -> Array:
        """The staging memory in bytes of conversions of an activation (`resharding.staging`), by source and wanted."""
        return self._stage(sources, wanted, backward=backward)[0] * self.itemsize

    def makes_another(self, sources: Sequence[Layout], wanted: Sequence[Layout], *, backward: bool) -> Array:
        """Whether these conversions return a tensor other than their input, by source and wanted layout."""
        return self._stage(sources, wanted, backward=backward)[1]

    def _stage(self, sources: Sequence[Layout], wanted: Sequence[Layout], *, backward: bool) -> tuple[Array, Array]:
        self.prices(sources, wanted)
        assert self._paths is not None
        if self._staged is None:
            shape = tuple(tensor_of(self.ref).shape)
            self._staged = staged_of_paths(self._paths, shape, self.cluster.shape, self.order)
        rows = np.array([self.sources[layout] for layout in sources], dtype=np.int64)
        at = rows[:, None], np.array([self.wanted[layout] for layout in wanted], dtype=np.int64)
        elements, another = self._staged[backward]
        return elements[at], another[at]

    def _all(self, sources: Sequence[Layout], wanted: Sequence[Layout]) -> Prices:
        shape = tuple(tensor_of(self.ref).shape)
        mesh, grad = self.cluster.shape, self.needs_grad
        paths = all_paths(sources, wanted, shape, mesh, needs_grad=grad, known=self.routes)
        calls = np.array([1.0 if self.grouping is None else self.grouping.calls(self.ref, w) for w in wanted])
        parts = {count: self._totals(paths, count) for count in np.unique(calls).tolist()}
        forward, forward_live, backward, back_live = (
            np.stack([parts[count][kind][..., column] for column, count in enumerate(calls.tolist())], axis=-1)
            for kind in range(4)
        )
        self._paths, self._transfer_paths, self._staged = paths, None, None
        return Prices(
            forward,
            backward,
            forward_live.sum(axis=0).astype(np.int64),
            back_live.sum(axis=0).astype(np.int64),
            paths.possible,
            None if self.grouping is None else shares_of(paths, self.ref, wanted, self.grouping, mesh),
        )

    def _totals(self, paths: Paths, calls: float) -> list[Array]:
        """Forward seconds, number of forward collectives, and the same backward, each by axis, source and wanted
        layout. A collective counts as `calls` of one (a parameter's part of a bucket)."""
        by_step = np.zeros((len(paths.axis) + 1, 4))  # the last at -1: no step
        by_step[:-1, :2] = self._parts(paths.axis, paths.forward, self.itemsize, calls)
        by_step[:-1, 2:] = self._parts(paths.axis, paths.backward, self.gradient_itemsize, calls)
        by_axis = self._by_axis(paths.axis, by_step)
        return [np.stack([_summed(figures[:, kind], paths.numbers) for figures in by_axis]) for kind in range(4)]

    def _by_axis(self, axes: Array, by_step: Array) -> list[Array]:
        """The figures of each step; by axis for parameters, whose collectives run on several axes at the same time."""
        if self.grouping is None:
            return [by_step]
        axis_of_step = np.append(axes, -1)[:, None]
        return [np.where(axis_of_step == axis, by_step, 0.0) for axis in range(len(self.cluster.axes))]

    def _all_transfer_paths(self, paths: Paths) -> tuple[Array, ...]:
        """The fields of `TransferPath` for each pair of layouts."""
        ranks = np.array([axis.size for axis in self.cluster.axes])[paths.axis]
        several = ranks > 1
        handed, arriving_elements, sent, results = (np.zeros(len(paths.axis) + 1, dtype=np.int64) for _ in range(4))
        reduces, scatters, copied = (np.zeros(len(paths.axis) + 1, dtype=bool) for _ in range(3))
        handed[:-1] = np.where(several & (paths.forward.kind >= 0), paths.forward.elements, 0)
        reduces[:-1] = several & (paths.backward.kind >= 0)
        sent[:-1] = np.where(reduces[:-1], paths.backward.elements, 0)
        scatters[:-1] = reduces[:-1] & (paths.backward.kind != KINDS.index("all_reduce"))
        for number, kind in enumerate(KINDS):
            for sends, moves, elements in (
                (paths.forward, handed > 0, arriving_elements),
                (paths.backward, reduces, results),
            ):
                at = np.flatnonzero(moves[:-1] & (sends.kind == number))
                elements[at] = RESULT[kind](sends.elements[at], ranks[at])
            if kind in IN_ANOTHER_ORDER:
                copied[np.flatnonzero(reduces[:-1] & (paths.backward.kind == number))] = True
        handed_by_step = handed[paths.numbers]
        first, last = (
            _first(handed_by_step, handed_by_step > 0),
            _first(handed_by_step[:, :, ::-1], handed_by_step[:, :, ::-1] > 0),
        )
        arrived = _first(arriving_elements[paths.numbers][:, :, ::-1], handed_by_step[:, :, ::-1] > 0)
        reducing, scattering = reduces[paths.numbers], scatters[paths.numbers]
        result = _first(results[paths.numbers][:, :, ::-1], reducing[:, :, ::-1])  # backward takes the steps in reverse
        runs_before = reducing[:, :, ::-1].cumsum(axis=2)[:, :, ::-1] > reducing
        later = (scattering & runs_before).any(axis=2)
        arrives = _first(np.where(copied, results, 0)[paths.numbers], reducing)
        passes = _passes(paths.numbers, reduces, sent, results, copied)
        reduced = reducing.any(axis=2), result, scattering.any(axis=2), later, arrives, passes
        return handed_by_step.sum(axis=2) - first, last, arrived, *reduced

    def _parts(self, axes: Array, sends: Sends, itemsize: int, calls: float) -> Array:
        """For each step: its seconds, and 1 if it is a collective."""
        figures = np.zeros((len(axes), 2))
        several = np.array([axis.size > 1 for axis in self.cluster.axes])
        at = np.flatnonzero((sends.kind >= 0) & several[axes])
        steps = np.stack([sends.kind[at], axes[at], sends.elements[at]])
        steps, places = np.unique(steps, axis=1, return_inverse=True)
        figures[at, 1] = 1.0
        seconds = [
            self._collective(KINDS[kind], self.cluster.axes[a], n * itemsize, calls) for kind, a, n in steps.T.tolist()
        ]
        if seconds:
            figures[at, 0] = np.array(seconds)[places.reshape(-1)]
        return figures

    def _collective(self, kind: CollectiveKind, axis: Axis, size: int, calls: float) -> float:
        if self.grouping is None:
            return collective_seconds(kind, size, axis)
        return member_seconds(kind, size, calls, axis) + copies_seconds(kind, size, axis, self.cluster.device)


def _summed(by_step: Array, numbers: Array) -> Array:
    """For each pair, the sum over its steps; the last entry of `by_step` stands for no step."""
    total = np.zeros(numbers.shape[:2])
    if by_step.any():
        for step in np.moveaxis(numbers, 2, 0):
            total += by_step[step]
    return total


def _passes(numbers: Array, reduces: Array, sent: Array, results: Array, copied: Array) -> Array:
    """The most elements that are there when one collective backward has arrived and the next begins."""
    present, most = (np.zeros(numbers.shape[:2], dtype=np.int64) for _ in range(2))
    once = np.ones(numbers.shape[:2], dtype=np.int64)
    for step in np.moveaxis(numbers, 2, 0)[::-1]:
        follows = reduces[step] & (present > 0)
        peak = np.maximum.reduce([present * once, present + sent[step], sent[step] + results[step]])
        most = np.where(follows, np.maximum(most, peak), most)
        present = np.where(reduces[step], np.where(results[step] > 0, results[step], sent[step]), present)
        once = np.where(reduces[step], 1 + copied[step], once)
    return most


def _first(values: Array, holds: Array) -> Array:
    """Along the last axis, the first value at which `holds` is true; without any, the value at index 0."""
    return np.take_along_axis(values, np.argmax(holds, axis=2)[:, :, None], axis=2)[:, :, 0]
