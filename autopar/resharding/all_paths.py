"""The cheapest conversions between many pairs of layouts at once: what `reshard.steps` finds for each of them.

What a change of one axis sends depends on the placements that it has before and after, and on how many elements one
device holds; so all changes between the same two placements are priced together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.layout import R_PLUS, Layout, Placement, R
from autopar.resharding.path_edges import Array, Edges, Sends
from autopar.resharding.reshard import Shape, is_legal

_AT_ONCE = 4_000  # pairs that are looked at together: what is known of them stays in the caches


@dataclass(frozen=True)
class Paths:
    """`numbers[s, w]`: the steps from source s to wanted layout w, as places in the other arrays, -1 behind the last.

    `axis`: which one a step changes. `found[s, w]` is False where there is no way. `used`: the steps' numbers among
    `edges`.
    """

    axis: Array
    forward: Sends
    backward: Sends
    numbers: Array
    found: Array
    edges: Edges
    used: Array


@dataclass(frozen=True)
class Routes:
    """Paths without what they send. `used`: the edges' numbers of their steps; `numbers` and `found` as in `Paths`."""

    used: Array
    numbers: Array
    found: Array


KnownRoutes = dict[Hashable, Routes]


def all_paths(
    sources: Sequence[Layout],
    wanted: Sequence[Layout],
    shape: Shape,
    mesh_shape: Shape,
    *,
    needs_grad: bool,
    known: KnownRoutes | None = None,
) -> Paths:
    """The dynamic programming of `reshard.steps`, for all pairs at a time.

    With `needs_grad=False`, the layouts are those of values. `known`: routes of tensors that are divided alike, of
    whatever lengths; those found now are added.
    """
    rests = [R, R_PLUS] if needs_grad else [R]
    edges = Edges([*sources, *wanted], rests, shape, mesh_shape, needs_grad)
    key = edges.form, tuple(sources), tuple(wanted)
    routes = None if known is None else known.get(key)
    if routes is None:
        legal = [
            np.array([is_legal(layout, shape, mesh_shape) for layout in some], dtype=bool) for some in (sources, wanted)
        ]
        routes = _routes(edges, rests, edges.digits(sources), edges.digits(wanted), legal[0][:, None] & legal[1])
        if known is not None:
            known[key] = routes
    return Paths(*edges.sends(routes.used), routes.numbers, routes.found, edges, routes.used)


def _routes(edges: Edges, rests: Sequence[Placement], start: Array, end: Array, legal: Array) -> Routes:
    """By the digits of sources and of wanted layouts, and which pairs of them are legal."""
    axes = len(edges.places)
    numbers = np.full((len(start), len(end), axes), -1, dtype=np.int32)
    found = np.zeros((len(start), len(end)), dtype=bool)
    differ = start[:, None, :] != end[None, :, :]
    masks = (differ << np.arange(axes)).sum(axis=2)
    for mask in range(1 << axes):
        changed = [axis for axis in range(axes) if mask >> axis & 1]
        for s, w in _parts(masks == mask):
            cost, steps = _cheapest_orders(edges, start[s], end[w], changed)
            found[s, w] = np.isfinite(cost)
            numbers[s, w, : len(changed)] = steps
    for s, w in _parts(legal & ~found):
        detours = _Detours(edges, rests, start[s], end[w])
        found[s, w] = np.isfinite(detours.spent)
        if detours.steps.shape[1] > numbers.shape[2]:
            longer = ((0, 0), (0, 0), (0, detours.steps.shape[1] - numbers.shape[2]))
            numbers = np.pad(numbers, longer, constant_values=-1)
        numbers[s, w, : detours.steps.shape[1]] = detours.steps
    occurs = np.zeros(edges.cost.size + 1, dtype=bool)  # the last is for -1
    occurs[numbers] = True
    used = np.flatnonzero(occurs[:-1])
    places = np.full(len(occurs), -1, dtype=np.int32)
    places[used] = np.arange(len(used))
    return Routes(used, places[numbers], found & legal)


def _parts(where: Array) -> Iterator[tuple[Array, Array]]:
    """The rows and columns of some pairs, some thousand at a time."""
    s, w = np.nonzero(where)
    for first in range(0, len(s), _AT_ONCE):
        yield s[first : first + _AT_ONCE], w[first : first + _AT_ONCE]


def _cheapest_orders(edges: Edges, start: Array, end: Array, changed: Sequence[int]) -> tuple[Array, Array]:
    """Of pairs that differ on the same axes: what the cheapest order sends, and its steps.

    By the set of axes that have changed, what that costs at least, and which of them was the last.
    """
    many, n = len(start), len(changed)
    everyone, axes = np.arange(many), np.array(changed, dtype=np.int64)
    code = np.empty((1 << n, many), dtype=np.int64)
    code[0] = start @ edges.strides
    spent = np.full((1 << n, many), math.inf)
    spent[0] = 0.0
    last = np.zeros((1 << n, many), dtype=np.int64)
    for then in range(1, 1 << n):
        for k in reversed(range(n)):
            if not then >> k & 1:
                continue
            done, axis = then ^ 1 << k, changed[k]
            total = spent[done] + edges.cost.take(edges.number(code[done], axis, end[:, axis]))
            better = total < spent[then]
            np.copyto(spent[then], total, where=better)
            np.copyto(last[then], k, where=better)
        code[then] = code[done] + (end[:, axis] - start[:, axis]) * edges.strides[axis]
    steps = np.empty((many, n), dtype=np.int64)
    state = np.full(many, (1 << n) - 1)
    for place in reversed(range(n)):
        k = last[state, everyone]
        state = state ^ 1 << k
        steps[:, place] = edges.number(code[state, everyone], axes[k], end[everyone, axes[k]])
    steps[np.isinf(spent[-1])] = -1
    return spent[-1], steps


class _Detours:
    """The cheapest ways of pairs where every order of the changes passes through an impossible layout, as in `reshard`.

    On the way an axis lies as wanted, as given, or as one of `rests`. What ways of one step more cost is known from
    those of so many (Bellman and Ford), for all layouts that these make of each pair, and all pairs at once. `spent`:
    what each pair's way costs, infinity where there is none; `steps`: its numbers, -1 behind the last.
    """

    def __init__(self, edges: Edges, rests: Sequence[Placement], start: Array, end: Array) -> None:
        self.edges = edges
        self.many, self.axes = len(start), len(edges.places)
        alike = [np.broadcast_to([places[rest] for places in edges.places], start.shape) for rest in rests]
        # by choice, axis and pair: the digit; pairs come last, along which all is done at once
        self.places = np.ascontiguousarray(np.moveaxis(np.stack([end, start, *alike]), 1, 2))
        self.choices = len(self.places)
        codes = np.zeros((1, self.many), dtype=np.int64)
        for axis in range(self.axes):
            codes = (codes[:, None] + self.places[:, axis] * edges.strides[axis]).reshape(-1, self.many)
        self.codes = codes
        self.spent, ways, lengths = self._search([self._costs(axis) for axis in range(self.axes)])
        self.steps = self._trace(ways, lengths)

    def _costs(self, axis: int) -> Array:
        """What the changes of an axis cost: by choices of axes before, its own, its next, those of axes behind, and
        pair. Of equal choices only the first is gone to."""
        width, places = self.choices, self.places[:, axis]
        codes = self.codes.reshape(width**axis, width, 1, -1, self.many)
        costs = self.edges.cost.take(self.edges.number(codes, axis, places[:, None]))
        for choice in range(width):
            costs[:, :, choice, :, (places[choice] == places[:choice]).any(axis=0)] = math.inf
        return costs

    def _search(self, costs: Sequence[Array]) -> tuple[Array, list[Array], Array]:
        """Step by step, until none goes on to what costs less than it did in fewer: what the ways cost, by the number
        of steps which choices each of them comes from, and how many steps the cheapest has."""
        width = self.choices
        given = width ** np.arange(self.axes)[::-1] @ (self.places[0] != self.places[1])
        states = np.arange(len(self.codes), dtype=np.int32)
        spent = np.full(self.codes.shape, math.inf)
        spent[given, np.arange(self.many)] = 0.0
        best, ways, lengths = spent.copy(), list[Array](), np.zeros(self.many, dtype=np.int64)
        while np.isfinite(spent).any():
            then, before = np.full(spent.shape, math.inf), np.full(spent.shape, -1, dtype=np.int32)
            for axis, cost in enumerate(costs):
                shape = width**axis, width, -1, self.many
                here, there, came = (every.reshape(shape) for every in (spent, then, before))
                for choice in range(width):
                    total = here[:, choice, None] + cost[:, choice]
                    better = total < there
                    np.copyto(there, total, where=better)
                    np.copyto(came, states.reshape(*shape[:3], 1)[:, choice, None], where=better)
            better = (then < best) & (then < best[0])  # 0: all axes as wanted
            best, spent = np.where(better, then, best), np.where(better, then, math.inf)
            ways.append(before)
            lengths[better[0]] = len(ways)
        return best[0], ways, lengths

    def _trace(self, ways: Sequence[Array], lengths: Array) -> Array:
        """The steps of the cheapest ways, from their ends."""
        steps = np.full((self.many, int(lengths.max(initial=0))), -1, dtype=np.int64)
        state = np.zeros(self.many, dtype=np.int64)
        for length in range(steps.shape[1], 0, -1):
            some = np.flatnonzero(lengths >= length)
            then, before = state[some], ways[length - 1][state[some], some]
            changed = np.argmax(self._digits(before) != self._digits(then), axis=1)
            place = self.places[self._digits(then)[np.arange(len(some)), changed], changed, some]
            steps[some, length - 1] = self.edges.number(self.codes[before, some], changed, place)
            state[some] = before
        return steps

    def _digits(self, states: Array) -> Array:
        """The choice of each axis."""
        return states[:, None] // self.choices ** np.arange(self.axes)[::-1] % self.choices
