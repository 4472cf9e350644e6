"""The edges of the graph of layouts, as arrays: every change of one axis, what it sends and what it costs.

A layout's *code* is the mixed-radix number of its placements; a change's *number* is that of (code before, axis, next
placement).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.layout import Layout, Placement, R, shard
from autopar.resharding.reshard import (
    CollectiveKind,
    Sent,
    Shape,
    change,
    is_legal,
    local_elements,
    ring_share,
    slower,
    whole_of,
)

Array = Any  # of numpy

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Sends:
    """What some steps send in one direction: the index in KINDS (-1: nothing), and the elements that one device hands
    in."""

    kind: Array
    elements: Array


class Edges:
    """Every change of one axis among all layouts that combine the placements which each axis has in `layouts`, and
    `rests` on every axis."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        rests: Sequence[Placement],
        shape: Shape,
        mesh_shape: Shape,
        needs_grad: bool,
    ) -> None:
        axes = len(mesh_shape)
        self.places = [
            {placement: i for i, placement in enumerate(dict.fromkeys([*(layout[axis] for layout in layouts), *rests]))}
            for axis in range(axes)
        ]
        self.sizes = sizes = [len(places) for places in self.places]
        self.strides = np.array([math.prod(sizes[axis + 1 :]) for axis in range(axes)], dtype=np.int64)
        self._mesh_shape, self._needs_grad, self._whole = mesh_shape, needs_grad, whole_of(shape)
        self._elements = _elements([list(placements) for placements in self.places], shape, mesh_shape)
        self.shape = math.prod(sizes), axes, max(sizes)
        self._changes: list[dict[tuple[int, int], tuple[Sent | None, Sent | None]]] = [{} for _ in range(axes)]
        for axis, places in enumerate(self.places):
            for (src, i), (dst, j) in itertools.permutations(places.items(), 2):
                sends = change(src, dst, needs_grad)
                if sends is not None:
                    self._changes[axis][i, j] = sends if mesh_shape[axis] > 1 else (None, None)

    @property
    def form(self) -> Hashable:
        """A key of what the costs depend on: the placements, and the part of the tensor that each layout leaves a
        device. Tensors of equal form have the same cheapest paths."""
        divisor = np.where(self._elements >= 0, np.gcd(self._elements, self._whole), self._whole)
        parts = np.stack([self._elements // divisor, self._whole // divisor])  # -1 / 1 where the layout is illegal
        return tuple(map(tuple, self.places)), self._mesh_shape, self._needs_grad, parts.tobytes()

    @functools.cached_property
    def cost(self) -> Array:
        """The cost of each change as in `resharding.reshard.edge`, inf where it is impossible; indexed by the code
        before it, the axis, and the next placement."""
        cost = np.full(self.shape, math.inf)
        for axis, changes in enumerate(self._changes):
            for (i, j), sends in changes.items():
                self._price(cost, axis, i, j, sends)
        return cost

    def _price(self, cost: Array, axis: int, i: int, j: int, sends: tuple[Sent | None, Sent | None]) -> None:
        """Fill in the cost of changing an axis from its i-th placement to its j-th, for all placements of the
        others."""
        n, stride = self._mesh_shape[axis], int(self.strides[axis])
        elements = self._elements.reshape(-1, self.sizes[axis], stride)
        before, after = elements[:, i], elements[:, j]
        total = np.zeros(before.shape)
        for sent in sends:
            if sent is not None:
                total += _handed(sent, before, after, n) / self._whole * (n - 1) * ring_share(sent.kind, n)
        changed = cost[:, axis, j].reshape(elements.shape)
        changed[:, i] = np.where((before >= 0) & (after >= 0), slower(axis, self._mesh_shape) * total, math.inf)
        cost[:, axis, j] = changed.reshape(-1)

    def number(self, code: Any, axis: int, place: Any) -> Any:
        """The number of the change that gives `axis` of the layout `code` the placement number `place`."""
        return (code * self.shape[1] + axis) * self.shape[2] + place

    def sends(self, numbers: Array) -> tuple[Array, Sends, Sends]:
        """The axes of the changes with these numbers, and what they send forward and backward."""
        places: tuple[Array, ...] = np.unravel_index(numbers, self.shape)
        code, axis, place = places
        sends = [(np.full(len(numbers), -1), np.zeros(len(numbers), dtype=np.int64)) for _ in range(2)]
        digit = code // self.strides[axis] % np.array(self.sizes)[axis]
        then = code + (place - digit) * self.strides[axis]
        keys = (axis * max(self.sizes) + digit) * max(self.sizes) + place
        for key in np.unique(keys).tolist():
            at = keys == key
            a, (i, j) = key // max(self.sizes) ** 2, divmod(key % max(self.sizes) ** 2, max(self.sizes))
            before, after = self._elements[code[at]], self._elements[then[at]]
            for (kinds, elements), sent in zip(sends, self._changes[a][i, j], strict=True):
                if sent is not None:
                    kinds[at] = KINDS.index(sent.kind)
                    elements[at] = _handed(sent, before, after, self._mesh_shape[a])
        return axis, Sends(*sends[0]), Sends(*sends[1])

    def ends(self, numbers: Array) -> list[tuple[int, Layout, Layout]]:
        """For the changes with these numbers: the axis, and the layouts before and after."""
        ends = []
        for code, axis, place in zip(
            *(indices.tolist() for indices in np.unravel_index(numbers, self.shape)), strict=True
        ):
            digits = (code // stride % size for stride, size in zip(self.strides.tolist(), self.sizes, strict=True))
            before = Layout(tuple(list(placements)[i] for placements, i in zip(self.places, digits, strict=True)))
            ends.append((axis, before, before.replace(axis, list(self.places[axis])[place])))
        return ends

    def digits(self, layouts: Sequence[Layout]) -> Array:
        """The placement numbers of each layout, by axis."""
        rows = [[places[p] for p, places in zip(layout.placements, self.places, strict=True)] for layout in layouts]
        return np.array(rows, dtype=np.int64).reshape(len(layouts), len(self.places))


def _elements(places: Sequence[Sequence[Placement]], shape: Shape, mesh_shape: Shape) -> Array:
    """How many elements one device holds, for all combinations of the axes' placements in the order of their codes; -1
    where the shape does not allow the layout. The product of what each tensor dim allows by itself."""
    sizes = [len(placements) for placements in places]
    elements, legal = np.ones(sizes, dtype=np.int64), np.ones(sizes, dtype=bool)
    for dim in {p.dim for placements in places for p in placements if p.is_sharded} | set(range(len(shape))):
        outers = [[p.outer if p.is_sharded and p.dim == dim else 0 for p in placements] for placements in places]
        kinds = [np.unique(placements, return_inverse=True) for placements in outers]
        combinations = itertools.product(*(kind.tolist() for kind, _ in kinds))
        if dim < len(shape):
            lengths = [_local_length(combination, shape[dim], mesh_shape) for combination in combinations]
        else:
            lengths = [-1 if any(combination) else 1 for combination in combinations]
        table = np.array(lengths).reshape([len(kind) for kind, _ in kinds])[np.ix_(*(of for _, of in kinds))]
        elements *= table
        legal &= table >= 0
    return np.where(legal, elements, -1).reshape(-1)


@functools.lru_cache(maxsize=1 << 16)
def _local_length(outers: tuple[int, ...], length: int, mesh_shape: Shape) -> int:
    """How long the part of a dim is that one device holds; -1 if the layout is illegal. `outers`: the digit position at
    which each axis shards the dim, 0 if it does not."""
    layout, shape = Layout(tuple(shard(0, outer) if outer else R for outer in outers)), (length,)
    return local_elements(layout, shape, mesh_shape) if is_legal(layout, shape, mesh_shape) else -1


def _handed(sent: Sent, before: Array, after: Array, n: int) -> Array:
    """The elements that one device hands in, given those that it holds before and after the change."""
    return (after if sent.after else before) * (n if sent.whole else 1)
