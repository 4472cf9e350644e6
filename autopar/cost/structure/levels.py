"""Levels of recompute of a repeated block: a few nested sets of segments, from the graph alone.

Level l recomputes the segments of level l, which are stretches of the block's ops. Every segment lies in one of level
l + 1, and the last level is the whole block. A segment frees what its ops save in storages that nothing outside reads,
and keeps what it reads; its replay costs the seconds of its ops up to the last that saves something (`cost.traffic`).

The segments of a level maximise the bytes freed less the seconds times a rate, by dynamic programming over where
segments begin and end; falling rates give the levels. Only a few levels are kept, those that approximate the curve of
seconds over bytes best: a level close to the line between its neighbours is dropped, since some blocks at one neighbour
and some at the other do nearly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from autopar.cost.memory.formulas import StepMemory
from autopar.cost.traffic import in_segment, saves_inputs_alone
from autopar.graph import BIAS_OF, TensorRef, output_tensors, tensor_of
from autopar.leaf_calls import LeafCall

Array = Any
Span = tuple[int, int]  # first and last offset in a block, both inclusive

MOST = 3  # levels that are kept beside the whole block
_RATES = 40  # rates that are tried, in a geometric series
_BELOW = 0.99  # the lowest rate tried without the whole block, over the one at which the worst stretch breaks even


@dataclass(frozen=True)
class Levels:
    """The levels of a block of `length` nodes; `inner`: the segments of every level but the last, which is the whole
    block."""

    inner: tuple[tuple[Span, ...], ...]
    length: int

    def __len__(self) -> int:
        return len(self.inner) + 1

    def spans(self, level: int) -> tuple[Span, ...]:
        """The segments of a level; levels count from 1."""
        return self.inner[level - 1] if level <= len(self.inner) else ((0, self.length - 1),)

    def holding(self, offset: int, level: int) -> Span | None:
        """The segment of a level that contains a node, if any."""
        return next((span for span in self.spans(level) if span[0] <= offset <= span[1]), None)

    def together(self, first: int, second: int) -> int:
        """The lowest level at which two nodes are in one segment."""
        spans = ((level, self.holding(first, level)) for level in range(1, len(self) + 1))
        return next(level for level, span in spans if span is not None and span[0] <= second <= span[1])


class NoSegmentError(ValueError):
    """A stretch (offsets in a block) cannot be a segment; the message says why."""

    def __init__(self, span: Span, why: str) -> None:
        super().__init__(why)
        self.span = span


def levels_of(
    memory: StepMemory,
    nodes: Sequence[fx.Node],
    seconds: Callable[[fx.Node], float],
    *,
    most_levels: int = MOST,
    forced: Sequence[Span] = (),
    free: Collection[int] | None = None,
    parted: Collection[int] = (),
    whole: bool = True,
) -> Levels:
    """The levels of a block; `seconds`: the forward seconds of a node.

    `forced`: the segments of the first level, whatever their gain. `free`: the ops (offsets) that segments below the
    whole block may contain, by default all; of those in `parted` no segment may contain all. `whole`: segments must
    free more bytes per second than the whole block does. Raises NoSegmentError if a forced segment is impossible.
    """
    if any(isinstance(node.target, LeafCall) for node in nodes):
        for span in forced:
            raise NoSegmentError(span, "the block holds a leaf, and has no other segments")
        return Levels((), len(nodes))
    block = _Block(memory, nodes, seconds)
    first = tuple((block.ops.index(start), block.ops.index(end)) for start, end in forced)
    for span, places in zip(forced, first, strict=True):
        if not block.possible[places]:
            raise NoSegmentError(
                span, "a parameter that it reads is read elsewhere too, or it parts a product from its bias"
            )
    if free is not None:
        block.allow(free, parted)
    inner = _pruned(block, block.solutions(first, whole), max(0, most_levels - bool(first)), first, whole)
    return Levels(tuple(block.offsets(spans) for spans in ([first] if first else []) + inner), len(nodes))


class _Block:
    """Matrices over all stretches [a, b] of a block's ops: bytes freed, seconds of the replay, and whether [a, b] can
    be a segment. A *place* is an op's index among the block's ops, an offset its index among all nodes."""

    def __init__(self, memory: StepMemory, nodes: Sequence[fx.Node], seconds: Callable[[fx.Node], float]) -> None:
        self.memory, self.nodes = memory, nodes
        self.ops = [i for i, node in enumerate(nodes) if in_segment(node) and output_tensors(node)]
        self.place = {nodes[offset]: i for i, offset in enumerate(self.ops)}
        self.op_count = len(self.ops)
        self.freed = self._freed() - self._kept_besides()
        self.seconds = self._seconds(seconds)
        self.possible = self._possible()

    def _freed(self) -> Array:
        """The bytes that [a, b] frees of what its ops save: of storages that are made at a or later and read last at b
        or before, and internal bytes. Sums over all such places, by cumulative sums in both directions."""
        memory = self.memory
        freed = np.zeros((self.op_count, self.op_count + 1))
        reads = self._reads()
        for root in memory.saved_roots:
            if root.node in self.place:
                last = max([self.place[root.node], *reads.get(root, ())])
                freed[self.place[root.node], last] += tensor_of(root).nbytes
        for node, i in self.place.items():
            freed[i, i] += memory.saved(node)[2]
        return np.cumsum(np.cumsum(freed[::-1], axis=0)[::-1], axis=1)[:, : self.op_count]

    def _kept_besides(self) -> Array:
        """The bytes that a stretch reads from before it and that nothing else would keep: recompute has to."""
        memory = self.memory
        kept = np.zeros((self.op_count, self.op_count))
        for root, places in self._reads().items():
            if root in memory.saved_roots or root.node.op in ("placeholder", "get_attr"):
                continue
            made = self.place.get(root.node, -1)
            for a in range(made + 1, self.op_count):
                first = next((p for p in sorted(places) if p >= a), self.op_count)
                if first < self.op_count:
                    kept[a, first] += tensor_of(root).nbytes
        return np.cumsum(kept, axis=1)

    def _reads(self) -> dict[TensorRef, set[int]]:
        """For each storage the places at which it is read; `op_count` stands for reads after the block."""
        memory = self.memory
        places: dict[TensorRef, set[int]] = {}
        inside = set(self.nodes)
        for node in self.nodes:
            for ref in memory.inputs[node] if node in self.place else ():
                places.setdefault(memory.roots[ref], set()).add(self.place[node])
            for i in range(len(output_tensors(node))):
                ref = TensorRef(node, i)
                if any(user not in inside for user in node.users):
                    places.setdefault(memory.roots[ref], set()).add(self.op_count)
        return places

    def _seconds(self, seconds: Callable[[fx.Node], float]) -> Array:
        """The seconds of replaying [a, b], up to the last op that saves something."""
        of_ops = [seconds(self.nodes[offset]) for offset in self.ops]
        before = np.concatenate([[0.0], np.cumsum(of_ops)])
        ends, end = np.zeros(self.op_count, dtype=np.int64), 0
        for i, offset in enumerate(self.ops):
            if self.memory.saves(self.nodes[offset]):
                end = i if saves_inputs_alone(self.nodes[offset]) else i + 1
            ends[i] = end
        return np.maximum(0.0, before[ends][None, :] - before[: self.op_count, None])

    def _possible(self) -> Array:
        """The stretches that can be segments: not the whole block; each parameter is read entirely inside or entirely
        outside; and a product is not separated from its split bias."""
        possible = np.triu(np.ones((self.op_count, self.op_count), dtype=bool))
        possible[0, self.op_count - 1] = False
        for node, place in self.place.items():
            product = node.meta.get(BIAS_OF)
            if product in self.place:  # product and addition may be merged into one op again
                possible[self.place[product] + 1 : place + 1, :] = False
                possible[:, self.place[product] : place] = False
        begins, ends = np.arange(self.op_count)[:, None], np.arange(self.op_count)[None, :]
        parameters = {ref.node for node in self.place for ref in self.memory.inputs[node]}
        for parameter in filter(self.memory.is_parameter, parameters):
            readers = [self.place.get(user) for user in parameter.users]
            inside = [place for place in readers if place is not None]
            whole = (begins <= min(inside)) & (ends >= max(inside)) & (len(inside) == len(readers))
            any_inside = np.zeros_like(possible)
            for place in inside:
                any_inside |= (begins <= place) & (ends >= place)
            possible &= whole | ~any_inside
        return possible

    def allow(self, free: Collection[int], parted: Collection[int]) -> None:
        """Restrict the stretches to ops in `free`, and exclude those that contain all ops in `parted`, if it has
        any."""
        barred = np.cumsum([0, *(offset not in free for offset in self.ops)])
        self.possible &= barred[None, 1:] == barred[:-1, None]
        if places := [place for place, offset in enumerate(self.ops) if offset in parted]:
            self.possible[: min(places) + 1, max(places) :] = False

    # -- segments -----------------------------------------------------------------------------------------------------

    def solutions(self, first: tuple[Span, ...] = (), whole: bool = True) -> list[tuple[Span, ...]]:
        """Nested sets of segments at falling rates, which all contain the segments `first`; with `whole`, down to the
        rate (bytes freed per second) of the whole block."""
        useful = self.possible & (self.freed > 0)
        if not useful.any():
            return []
        rates = self.freed[useful] / np.maximum(self.seconds[useful], 1e-12)
        high, low = float(rates.max()), float(self.freed[0, -1] / max(self.seconds[0, -1], 1e-12))
        low = low if whole else float(rates.min()) * _BELOW
        solutions: list[tuple[Span, ...]] = []
        before = first
        for rate in np.geomspace(max(high, low), low, _RATES):
            spans = self._best(float(rate), before)
            if spans != before and spans:
                solutions.append(spans)
                before = spans
        return solutions

    def _best(self, rate: float, inside: Sequence[Span]) -> tuple[Span, ...]:
        """The segments with the largest sum of bytes freed less rate times seconds, which contain those in `inside`."""
        covered, cut = np.zeros(self.op_count, dtype=bool), np.zeros(self.op_count + 1, dtype=bool)
        for first, last in inside:
            covered[first : last + 1] = True
            cut[first + 1 : last + 1] = True
        values = np.where(self.possible, self.freed - rate * self.seconds, -np.inf)
        values[cut[:-1], :] = -np.inf
        values[:, cut[1:]] = -np.inf
        best, start = np.full(self.op_count + 1, -np.inf), np.full(self.op_count + 1, -1)
        best[0] = 0.0
        for j in range(1, self.op_count + 1):
            if not covered[j - 1]:
                best[j] = best[j - 1]
            sums = best[:j] + values[:j, j - 1]
            i = j - 1 - int(np.argmax(sums[::-1]))  # the shortest among equally good segments
            if sums[i] > best[j] and not np.isclose(sums[i], best[j], rtol=1e-9, atol=0.0):
                best[j], start[j] = sums[i], i
        spans, j = [], self.op_count
        while j > 0:
            if start[j] >= 0:
                spans.append((int(start[j]), j - 1))
                j = int(start[j])
            else:
                j -= 1
        return tuple(reversed(spans))

    def total(self, spans: Sequence[Span]) -> tuple[float, float]:
        """Bytes freed and seconds of some segments."""
        return sum(float(self.freed[s]) for s in spans), sum(float(self.seconds[s]) for s in spans)

    @property
    def whole(self) -> tuple[float, float]:
        return float(self.freed[0, -1]), float(self.seconds[0, -1])

    def offsets(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The segments given by places, as offsets."""
        return tuple((self.ops[first], self.ops[last]) for first, last in spans)


def _pruned(
    block: _Block, solutions: list[tuple[Span, ...]], most_levels: int, first: tuple[Span, ...] = (), whole: bool = True
) -> list[tuple[Span, ...]]:
    """At most `most_levels` after the `first`: drops, one by one, the level that is closest to the line between its
    neighbours."""
    points = [block.total(first), *map(block.total, solutions), *([block.whole] if whole else [])]
    kept = list(range(len(points)))
    while len(kept) > 2:
        gains = [_below(points[a], points[b], points[c]) for a, b, c in zip(kept, kept[1:], kept[2:], strict=False)]
        least = min(range(len(gains)), key=gains.__getitem__)
        if gains[least] > 0 and len(kept) - 1 - whole <= most_levels:
            break
        del kept[least + 1]
    return [solutions[i - 1] for i in kept[1:] if i <= len(solutions)][-most_levels:] if most_levels else []


def _below(before: tuple[float, float], point: tuple[float, float], after: tuple[float, float]) -> float:
    """Twice the area of the triangle of a level and its neighbours; not positive if the level is not below the line
    between them (seconds over bytes), that is, of no use."""
    (x0, y0), (x1, y1), (x2, y2) = before, point, after
    return (x1 - x0) * (y2 - y0) - (x2 - x0) * (y1 - y0)
