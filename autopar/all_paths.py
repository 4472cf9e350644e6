"""The cheapest conversions between many pairs of layouts at once: what `reshard.steps` finds for each of them.

What a change of one axis sends depends on the placements that it has before and after, and on how many elements one
device holds; so all changes between the same two placements are priced together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.layout import R_PLUS, Layout, Placement, R
from autopar.reshard import CollectiveKind, Sent, Shape, change, is_legal, local_elements, ring_share, slower

Array = Any  # of numpy


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
    far = np.argwhere(legal_pairs & ~found)
    if len(far):
        detours = _Detours(edges, rests, start[far[:, 0]], end[far[:, 1]])
        found[far[:, 0], far[:, 1]] = np.isfinite(detours.spent)
        if detours.steps.shape[1] > numbers.shape[2]:
            longer = ((0, 0), (0, 0), (0, detours.steps.shape[1] - numbers.shape[2]))
            numbers = np.pad(numbers, longer, constant_values=-1)
        numbers[far[:, 0], far[:, 1], : detours.steps.shape[1]] = detours.steps
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
    """The cheapest ways of pairs where every order of the changes passes through an impossible layout, as in `reshard`.

    On the way an axis lies as wanted, as given, or as one of `rests`. What ways of one step more cost is known from
    those of so many (Bellman and Ford), for all layouts that these make of each pair, and all pairs at once. `spent`:
    what each pair's way costs, infinity where there is none; `steps`: its numbers, -1 behind the last.
    """

    def __init__(self, edges: _Edges, rests: Sequence[Placement], start: Array, end: Array) -> None:
        self.edges = edges
        self.many, self.axes = len(start), len(edges.places)
        alike = [np.broadcast_to([places[rest] for places in edges.places], start.shape) for rest in rests]
        self.places = np.stack([end, start, *alike], axis=2)  # of each pair and axis, the digits of its choices
        self.choices = self.places.shape[2]
        codes = np.zeros((self.many, 1), dtype=np.int64)
        for axis in range(self.axes):
            codes = (codes[:, :, None] + self.places[:, axis, None, :] * edges.strides[axis]).reshape(self.many, -1)
        self.codes = codes
        self.spent, ways, lengths = self._search([self._costs(axis) for axis in range(self.axes)])
        self.steps = self._trace(ways, lengths)

    def _costs(self, axis: int) -> Array:
        """What the changes of an axis cost: by pair, choices of axes before, its own, of those behind, and the next."""
        places = self.places[:, axis, None, :]
        costs = self.edges.cost[self.codes[:, :, None], axis, places]
        return costs.reshape(self.many, self.choices**axis, self.choices, -1, self.choices)

    def _search(self, costs: Sequence[Array]) -> tuple[Array, list[Array], Array]:
        """Step by step, until none goes on to what costs less than it did in fewer: what the ways cost, by the number
        of steps which choices each of them comes from, and how many steps the cheapest has."""
        width = self.choices
        doubled = np.stack([(self.places[:, :, i, None] == self.places[:, :, :i]).any(2) for i in range(width)], axis=2)
        given = (self.places[:, :, 0] != self.places[:, :, 1]) @ width ** np.arange(self.axes)[::-1]
        spent = np.full(self.codes.shape, math.inf)
        spent[np.arange(self.many), given] = 0.0
        best, ways, lengths = spent.copy(), list[Array](), np.zeros(self.many, dtype=np.int64)
        while np.isfinite(spent).any():
            then, before = np.full(self.codes.shape, math.inf), np.full(self.codes.shape, -1)
            for axis, cost in enumerate(costs):
                here = spent.reshape(cost.shape[:4])
                total = here[..., None] + cost
                came = total.argmin(axis=2)  # by pair, choices before, behind, and the next of the axis
                found = np.take_along_axis(total, came[:, :, None], axis=2)[:, :, 0]
                found = np.where(doubled[:, axis, None, None, :], math.inf, found).swapaxes(2, 3).reshape(then.shape)
                came = came.swapaxes(2, 3).reshape(then.shape)
                better = found < then
                then = np.where(better, found, then)
                stride = width ** (self.axes - 1 - axis)
                state = np.arange(then.shape[1])
                before = np.where(better, state + (came - state // stride % width) * stride, before)
            better = (then < best) & (then < best[:, :1])  # 0: all axes as wanted
            best, spent = np.where(better, then, best), np.where(better, then, math.inf)
            ways.append(before)
            lengths[better[:, 0]] = len(ways)
        return best[:, 0], ways, lengths

    def _trace(self, ways: Sequence[Array], lengths: Array) -> Array:
        """The steps of the cheapest ways, from their ends."""
        steps = np.full((self.many, int(lengths.max(initial=0))), -1, dtype=np.int64)
        state = np.zeros(self.many, dtype=np.int64)
        for length in range(steps.shape[1], 0, -1):
            some = np.flatnonzero(lengths >= length)
            before = ways[length - 1][some, state[some]]
            changed = np.argmax(self._digits(before) != self._digits(state[some]), axis=1)
            place = self.places[some, changed, self._digits(state[some])[np.arange(len(some)), changed]]
            steps[some, length - 1] = self.edges.number(self.codes[some, before], changed, place)
            state[some] = before
        return steps

    def _digits(self, states: Array) -> Array:
        """The choice of each axis."""
        return states[:, None] // self.choices ** np.arange(self.axes)[::-1] % self.choices


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
