"""The cheapest conversions between many pairs of layouts at once: a vectorised `reshard.steps`, with equal results.

What changing one axis sends depends only on the axis' placements before and after and on how many elements one device
holds, so all changes between the same two placements are priced in one array operation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.layout import R_PLUS, Layout, Placement, R
from autopar.resharding.path_edges import Array, Edges, Sends
from autopar.resharding.reshard import Shape, is_legal

_AT_ONCE = 4_000  # pairs in one batch, few enough that the arrays of the dynamic programming stay in the CPU's caches


@dataclass(frozen=True)
class Paths:
    """Conversions of all pairs. `numbers[s, w]`: the steps from source s to wanted layout w, in order, as indices into
    `axis`, `forward`, `backward` and `used`; -1 after the last step.

    `axis`: the axis that each step changes. `possible[s, w]`: whether there is a conversion. `used`: the number of each
    step's change in `edges`.
    """

    axis: Array
    forward: Sends
    backward: Sends
    numbers: Array
    possible: Array
    edges: Edges
    used: Array


@dataclass(frozen=True)
class Routes:
    """Paths without what they send, so that tensors of other lengths can reuse them. The fields are those of
    `Paths`."""

    used: Array
    numbers: Array
    possible: Array


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
    """The dynamic programming of `reshard.steps`, for all pairs at once.

    With `needs_grad=False`, the layouts must be those of values. `known`: a cache of routes, shared by tensors of any
    lengths of which each layout leaves a device the same part (`Edges.form`); new routes are added.
    """
    rests = [R, R_PLUS] if needs_grad else [R]
    edges = Edges([*sources, *wanted], rests, shape, mesh_shape, needs_grad)
    key = edges.form, tuple(sources), tuple(wanted)
    routes = None if known is None else known.get(key)
    if routes is None:
        legal = [
            np.array([is_legal(layout, shape, mesh_shape) for layout in layouts], dtype=bool)
            for layouts in (sources, wanted)
        ]
        routes = _routes(edges, rests, edges.digits(sources), edges.digits(wanted), legal[0][:, None] & legal[1])
        if known is not None:
            known[key] = routes
    return Paths(*edges.sends(routes.used), routes.numbers, routes.possible, edges, routes.used)


def _routes(edges: Edges, rests: Sequence[Placement], start: Array, end: Array, legal: Array) -> Routes:
    """The routes of all pairs. `start`, `end`: the sources and wanted layouts as placement numbers by axis
    (`Edges.digits`); `legal`: the pairs of which the shape allows both layouts."""
    axes = len(edges.places)
    numbers = np.full((len(start), len(end), axes), -1, dtype=np.int32)
    possible = np.zeros((len(start), len(end)), dtype=bool)
    differ = start[:, None, :] != end[None, :, :]
    masks = (differ << np.arange(axes)).sum(axis=2)
    for mask in range(1 << axes):
        changed = [axis for axis in range(axes) if mask >> axis & 1]
        for s, w in _parts(masks == mask):
            cost, steps = _cheapest_orders(edges, start[s], end[w], changed)
            possible[s, w] = np.isfinite(cost)
            numbers[s, w, : len(changed)] = steps
    for s, w in _parts(legal & ~possible):
        detours = _Detours(edges, rests, start[s], end[w])
        possible[s, w] = np.isfinite(detours.spent)
        if detours.steps.shape[1] > numbers.shape[2]:
            longer = ((0, 0), (0, 0), (0, detours.steps.shape[1] - numbers.shape[2]))
            numbers = np.pad(numbers, longer, constant_values=-1)
        numbers[s, w, : detours.steps.shape[1]] = detours.steps
    occurs = np.zeros(edges.cost.size + 1, dtype=bool)  # the last entry is for -1
    occurs[numbers] = True
    used = np.flatnonzero(occurs[:-1])
    places = np.full(len(occurs), -1, dtype=np.int32)
    places[used] = np.arange(len(used))
    return Routes(used, places[numbers], possible & legal)


def _parts(mask: Array) -> Iterator[tuple[Array, Array]]:
    """The pairs where a mask is True, as row and column indices, in batches of `_AT_ONCE`."""
    s, w = np.nonzero(mask)
    for first in range(0, len(s), _AT_ONCE):
        yield s[first : first + _AT_ONCE], w[first : first + _AT_ONCE]


def _cheapest_orders(edges: Edges, start: Array, end: Array, changed: Sequence[int]) -> tuple[Array, Array]:
    """For pairs that differ on the same axes: the cost of the cheapest order of the changes (inf: none is possible),
    and its steps.

    Dynamic programming over the set of axes that have changed: the least cost to reach it, and the axis changed last.
    """
    pairs, n = len(start), len(changed)
    everyone, axes = np.arange(pairs), np.array(changed, dtype=np.int64)
    code = np.empty((1 << n, pairs), dtype=np.int64)
    code[0] = start @ edges.strides
    spent = np.full((1 << n, pairs), math.inf)
    spent[0] = 0.0
    last = np.zeros((1 << n, pairs), dtype=np.int64)
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
    steps = np.empty((pairs, n), dtype=np.int64)
    state = np.full(pairs, (1 << n) - 1)
    for place in reversed(range(n)):
        k = last[state, everyone]
        state = state ^ 1 << k
        steps[:, place] = edges.number(code[state, everyone], axes[k], end[everyone, axes[k]])
    steps[np.isinf(spent[-1])] = -1
    return spent[-1], steps


class _Detours:
    """The cheapest paths of pairs for which every order of the changes passes through an illegal layout, as in
    `reshard`.

    On such a path, each axis has one of its *choices*: the wanted placement, the source's, or one of `rests`. A state
    is one choice for each axis. Bellman-Ford by the number of steps, over all states and all pairs at once. `spent`:
    the cost of each pair's path, inf if there is none; `steps`: its changes' numbers, -1 after the last.
    """

    def __init__(self, edges: Edges, rests: Sequence[Placement], start: Array, end: Array) -> None:
        self.edges = edges
        self.pairs, self.axes = len(start), len(edges.places)
        rest_places = [np.broadcast_to([places[rest] for places in edges.places], start.shape) for rest in rests]
        # The placement number, by choice, axis and pair; pairs are the last dim, along which everything is vectorised.
        self.places = np.ascontiguousarray(np.moveaxis(np.stack([end, start, *rest_places]), 1, 2))
        self.choices = len(self.places)
        codes = np.zeros((1, self.pairs), dtype=np.int64)
        for axis in range(self.axes):
            codes = (codes[:, None] + self.places[:, axis] * edges.strides[axis]).reshape(-1, self.pairs)
        self.codes = codes
        self.spent, ways, lengths = self._search([self._costs(axis) for axis in range(self.axes)])
        self.steps = self._trace(ways, lengths)

    def _costs(self, axis: int) -> Array:
        """What changing `axis` costs, indexed by the choices of the axes before it, its own choice, its next choice,
        the choices of the axes after it, and the pair. Where choices are the same placement, only the first is
        reachable."""
        width, places = self.choices, self.places[:, axis]
        codes = self.codes.reshape(width**axis, width, 1, -1, self.pairs)
        costs = self.edges.cost.take(self.edges.number(codes, axis, places[:, None]))
        for choice in range(width):
            costs[:, :, choice, :, (places[choice] == places[:choice]).any(axis=0)] = math.inf
        return costs

    def _search(self, costs: Sequence[Array]) -> tuple[Array, list[Array], Array]:
        """Bellman-Ford until no longer path improves a state. Returns the cost of each pair's cheapest path; for each
        number of steps, the predecessor of every state; and the number of steps of each pair's cheapest path."""
        width = self.choices
        source_states = width ** np.arange(self.axes)[::-1] @ (self.places[0] != self.places[1])
        states = np.arange(len(self.codes), dtype=np.int32)
        spent = np.full(self.codes.shape, math.inf)
        spent[source_states, np.arange(self.pairs)] = 0.0
        best, ways, lengths = spent.copy(), list[Array](), np.zeros(self.pairs, dtype=np.int64)
        while np.isfinite(spent).any():
            then, before = np.full(spent.shape, math.inf), np.full(spent.shape, -1, dtype=np.int32)
            for axis, cost in enumerate(costs):
                shape = width**axis, width, -1, self.pairs
                cost_before, cost_after, came = (every.reshape(shape) for every in (spent, then, before))
                for choice in range(width):
                    total = cost_before[:, choice, None] + cost[:, choice]
                    better = total < cost_after
                    np.copyto(cost_after, total, where=better)
                    np.copyto(came, states.reshape(*shape[:3], 1)[:, choice, None], where=better)
            better = (then < best) & (then < best[0])  # state 0: all axes as wanted
            best, spent = np.where(better, then, best), np.where(better, then, math.inf)
            ways.append(before)
            lengths[better[0]] = len(ways)
        return best[0], ways, lengths

    def _trace(self, ways: Sequence[Array], lengths: Array) -> Array:
        """The steps of the cheapest paths, traced back from their ends."""
        steps = np.full((self.pairs, int(lengths.max(initial=0))), -1, dtype=np.int64)
        state = np.zeros(self.pairs, dtype=np.int64)
        for length in range(steps.shape[1], 0, -1):
            continuing = np.flatnonzero(lengths >= length)
            then, before = state[continuing], ways[length - 1][state[continuing], continuing]
            changed = np.argmax(self._digits(before) != self._digits(then), axis=1)
            place = self.places[self._digits(then)[np.arange(len(continuing)), changed], changed, continuing]
            steps[continuing, length - 1] = self.edges.number(self.codes[before, continuing], changed, place)
            state[continuing] = before
        return steps

    def _digits(self, states: Array) -> Array:
        """The choice of each axis in these states."""
        return states[:, None] // self.choices ** np.arange(self.axes)[::-1] % self.choices
