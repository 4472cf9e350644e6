"""The cheapest conversions between many pairs of layouts at once: what `reshard.steps` finds for each of them.

What a change of one axis sends depends on the placements that it has before and after, and on how many elements one
device holds; so all changes between the same two placements are priced together.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.layout import R_PLUS, Layout, Placement, R
from autopar.reshard import CollectiveKind, Sent, Shape, change, is_legal, local_elements, ring_share, slower

Array = Any  # of numpy
_NEVER = math.inf, 0


KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Sends:
    """What some steps send in one direction: places in KINDS, -1 for nothing, and elements that one device hands in."""

    kind: Array
    elements: Array


@dataclass(frozen=True)
class Paths:
    """`numbers[s, w]`: the steps from source s to wanted layout w, as places in the other arrays, -1 behind the last.

    `axis`: which one a step changes. `found[s, w]` is False where there is no way.
    """

    axis: Array
    forward: Sends
    backward: Sends
    numbers: Array
    found: Array


def all_paths(
    sources: Sequence[Layout], wanted: Sequence[Layout], shape: Shape, mesh_shape: Shape, *, needs_grad: bool
) -> Paths:
    """The dynamic programming of `reshard.steps`, for all pairs at a time.

    With `needs_grad=False`, the layouts are those of values.
    """
    rests = [R, R_PLUS] if needs_grad else [R]
    edges = _Edges([*sources, *wanted], rests, shape, mesh_shape, needs_grad)
    start, end = edges.digits(sources), edges.digits(wanted)
    axes = len(mesh_shape)
    numbers = np.full((len(sources), len(wanted), 2 * axes), -1, dtype=np.int64)
    found = np.zeros((len(sources), len(wanted)), dtype=bool)
    differ = start[:, None, :] != end[None, :, :]
    masks = (differ << np.arange(axes)).sum(axis=2)
    for mask in np.unique(masks):
        s, w = np.nonzero(masks == mask)
        changed = [axis for axis in range(axes) if mask >> axis & 1]
        cost, steps = _cheapest_orders(edges, start[s], end[w], changed)
        found[s, w] = np.isfinite(cost)
        numbers[s, w, : len(changed)] = steps
    legal = [
        np.array([is_legal(layout, shape, mesh_shape) for layout in some], dtype=bool) for some in (sources, wanted)
    ]
    legal_pairs = legal[0][:, None] & legal[1][None, :]
    detours = _Detours(edges, rests)
    for i, j in np.argwhere(legal_pairs & ~found).tolist():
        path = detours.cheapest(start[i].tolist(), end[j].tolist())
        if path is not None:
            found[i, j] = True
            if len(path) > numbers.shape[2]:
                longer = ((0, 0), (0, 0), (0, len(path) - numbers.shape[2]))
                numbers = np.pad(numbers, longer, constant_values=-1)
            numbers[i, j, : len(path)] = path
    used, places = np.unique(numbers[numbers >= 0], return_inverse=True)
    numbers[numbers >= 0] = places
    return Paths(*edges.sends(used), numbers, found & legal_pairs)


def _cheapest_orders(edges: _Edges, start: Array, end: Array, changed: Sequence[int]) -> tuple[Array, Array]:
    """Of pairs that differ on the same axes: what the cheapest order sends, and its steps."""
    many, n = len(start), len(changed)
    spent = [np.full(many, math.inf) for _ in range(1 << n)]
    paths = [np.full((many, n), -1, dtype=np.int64) for _ in range(1 << n)]
    spent[0][:] = 0.0
    for done in range((1 << n) - 1):
        here = start.copy()
        for k, axis in enumerate(changed):
            if done >> k & 1:
                here[:, axis] = end[:, axis]
        code = here @ edges.strides
        for k, axis in enumerate(changed):
            if done >> k & 1:
                continue
            then = done | 1 << k
            total = spent[done] + edges.cost[code, axis, end[:, axis]]
            better = total < spent[then]
            spent[then] = np.where(better, total, spent[then])
            paths[then][better] = paths[done][better]
            paths[then][better, done.bit_count()] = edges.number(code[better], axis, end[better, axis])
    return spent[-1], paths[-1]


class _Detours:
    """Dijkstra's algorithm as in `reshard`, where every order of the changes passes through an impossible layout.

    `rests`: what any axis may lie as on the way, beside what it lies as at the ends.
    """

    def __init__(self, edges: _Edges, rests: Sequence[Placement]) -> None:
        self._strides = edges.strides.tolist()
        self._cost, self._number = edges.cost.tolist(), edges.number
        self._rests = [[places[rest] for rest in rests] for places in edges.places]

    def cheapest(self, start: Sequence[int], end: Sequence[int]) -> list[int] | None:
        """The steps from one layout (its placements by axis) to another; None where there is no way."""
        choices = [
            list(dict.fromkeys((wanted, given, *rests)))
            for given, wanted, rests in zip(start, end, self._rests, strict=True)
        ]
        first, last = (sum(d * stride for d, stride in zip(some, self._strides, strict=True)) for some in (start, end))
        best: dict[int, tuple[float, int]] = {first: (0.0, 0)}
        came: dict[int, tuple[int, int]] = {}
        order = itertools.count()  # ties go to the path that was found first
        queue = [(0.0, 0, next(order), first, tuple(start))]
        while queue:
            spent, length, _, code, digits = heapq.heappop(queue)
            if code == last:
                path = []
                while code != first:
                    code, number = came[code]
                    path.append(number)
                return path[::-1]
            if (spent, length) > best[code]:
                continue
            for axis, places in enumerate(choices):
                costs, stride, here = self._cost[code][axis], self._strides[axis], digits[axis]
                for place in places:
                    then = (spent + costs[place], length + 1)
                    after = code + (place - here) * stride
                    if place != here and then < min(best.get(after, _NEVER), best.get(last, _NEVER)):
                        best[after] = then
                        came[after] = code, self._number(code, axis, place)
                        heapq.heappush(queue, (*then, next(order), after, (*digits[:axis], place, *digits[axis + 1 :])))
        return None


class _Edges:
    """Every change of one axis, among all layouts that are made of the same placements, and those of `rests`."""

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
        self._mesh_shape = mesh_shape
        self._elements = np.full(
            math.prod(sizes), -1, dtype=np.int64
        )  # of one device; -1 where the shape cannot lie so
        for code, placements in enumerate(itertools.product(*self.places)):
            layout = Layout(placements)
            if is_legal(layout, shape, mesh_shape):
                self._elements[code] = local_elements(layout, shape, mesh_shape)
        self.cost = np.full((math.prod(sizes), axes, max(sizes)), math.inf)
        self._changes: list[dict[tuple[int, int], tuple[Sent | None, Sent | None]]] = [{} for _ in range(axes)]
        for axis, places in enumerate(self.places):
            for (src, i), (dst, j) in itertools.permutations(places.items(), 2):
                found = change(src, dst, needs_grad)
                if found is not None:
                    self._changes[axis][i, j] = found if mesh_shape[axis] > 1 else (None, None)
                    self._price(axis, i, j)

    def _price(self, axis: int, i: int, j: int) -> None:
        """What it costs that an axis goes from its i-th placement to its j-th, wherever the others are."""
        n, stride = self._mesh_shape[axis], int(self.strides[axis])
        elements = self._elements.reshape(-1, self.sizes[axis], stride)
        before, after = elements[:, i], elements[:, j]
        total = np.zeros(before.shape)
        for sent in self._changes[axis][i, j]:
            if sent is not None:
                total += _handed(sent, before, after, n) * (n - 1) * ring_share(sent.kind, n)
        cost = self.cost[:, axis, j].reshape(elements.shape)
        cost[:, i] = np.where((before >= 0) & (after >= 0), slower(axis, self._mesh_shape) * total, math.inf)
        self.cost[:, axis, j] = cost.reshape(-1)

    def number(self, code: Any, axis: int, place: Any) -> Any:
        """The number of the change of an axis of a layout to another placement."""
        return (code * self.cost.shape[1] + axis) * self.cost.shape[2] + place

    def sends(self, numbers: Array) -> tuple[Array, Sends, Sends]:
        """The axes of some changes, and what they send forward and backward."""
        places: tuple[Array, ...] = np.unravel_index(numbers, self.cost.shape)
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

    def digits(self, layouts: Sequence[Layout]) -> Array:
        """The number of each layout's placement, by axis."""
        rows = [[places[p] for p, places in zip(layout.placements, self.places, strict=True)] for layout in layouts]
        return np.array(rows, dtype=np.int64).reshape(len(layouts), len(self.places))


def _handed(sent: Sent, before: Array, after: Array, n: int) -> Array:
    """The elements that one device hands in."""
    return (after if sent.after else before) * (n if sent.whole else 1)
