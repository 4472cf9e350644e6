"""Repeated blocks of a graph: runs of equal consecutive stretches, found by structure and not by name.

A block is a stretch of `period` nodes that repeats `count` times in a row. Nodes are equal if they run the same
function with the same constants on values of the same shapes, dtypes and `requires_grad`. Two stretches are equal if
their nodes and their edges are: an edge comes from inside the stretch, from the stretch before, or from a node before
the whole run that all stretches read. Where later stretches read the one before them, the first may read any other
node.

A stretch before such a run that is equal except that fewer of its tensors require gradients is a repeat of count one:
the first block after a frozen embedding, whose input requires none.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.fingerprints.frozen import frozen
from autopar.graph import KIND, SCOPE, VAL, input_nodes, output_tensors, target_name


@dataclass(frozen=True)
class Repeat:
    """`count` equal stretches of `period` nodes; the first begins at position `start`.

    `of`: the whole repeat, if these stretches are only a part of it because constraints tell them from the others.
    """

    start: int
    period: int
    count: int
    of: Repeat | None = None

    @property
    def end(self) -> int:
        """The position after the last stretch."""
        return self.start + self.period * self.count

    def instance(self, i: int) -> range:
        """The positions of stretch `i`."""
        return range(self.start + i * self.period, self.start + (i + 1) * self.period)


@dataclass(frozen=True)
class Region:
    """Positions `first` to `last` (inclusive): one block (number `instance` of repeat number `repeat`), or the nodes
    between two repeats."""

    first: int
    last: int
    repeat: int | None = None
    instance: int = 0


def regions(length: int, repeats: Sequence[Repeat]) -> tuple[Region, ...]:
    """A graph of `length` nodes as a sequence of regions, with one for every block.

    >>> [(r.first, r.last, r.repeat) for r in regions(9, [Repeat(2, 3, 2)])]
    [(0, 1, None), (2, 4, 0), (5, 7, 0), (8, 8, None)]
    """
    rows, at = [], 0
    for number, repeat in enumerate(repeats):
        if repeat.start > at:
            rows.append(Region(at, repeat.start - 1))
        for i in range(repeat.count):
            span = repeat.instance(i)
            rows.append(Region(span.start, span.stop - 1, number, i))
        at = repeat.end
    if at < length:
        rows.append(Region(at, length - 1))
    return tuple(rows)


def find_repeats(graph: fx.Graph) -> tuple[Repeat, ...]:
    """The repeats of a graph, in order; every block reads a parameter, its own or one that all blocks share."""
    nodes = list(graph.nodes)
    facts = _Facts(nodes, numpy.array(labels_of(nodes), dtype=numpy.int64))
    return tuple(sorted(_search(facts, 0, len(nodes)), key=lambda r: r.start))


def labels_of(nodes: Sequence[fx.Node]) -> list[int]:
    """A number for each node; the same for equal nodes (see the module's docstring)."""
    numbers: dict[Hashable, int] = {}
    label_of_kind: dict[int, Hashable] = {}
    return [numbers.setdefault(_label_by_kind(n, label_of_kind), len(numbers)) for n in nodes]


def repeats_under(
    graph: fx.Graph, marks: Mapping[fx.Node, Hashable], alike: Sequence[Repeat] | None = None
) -> tuple[Repeat, ...]:
    """The repeats `alike` (default: `find_repeats`), each cut between neighbouring blocks whose nodes have different
    `marks` (constraints).

    The blocks themselves stay the same, so that marks change neither buckets nor what may be recomputed as a whole.
    """
    alike = find_repeats(graph) if alike is None else tuple(alike)
    if not marks:
        return alike
    nodes, repeats = list(graph.nodes), list[Repeat]()
    for repeat in alike:
        marks_of = [[marks.get(nodes[at]) for at in repeat.instance(i)] for i in range(repeat.count)]
        begins = [i for i in range(repeat.count) if not i or marks_of[i] != marks_of[i - 1]]
        parts = zip(begins, [*begins[1:], repeat.count], strict=True)
        cut = [Repeat(repeat.instance(i).start, repeat.period, end - i, repeat) for i, end in parts]
        repeats += cut if len(begins) > 1 else [repeat]
    return tuple(repeats)


def unparted(repeats: Sequence[Repeat]) -> tuple[Repeat, ...]:
    """The repeats before constraints cut them (`repeats_under`)."""
    return tuple(dict.fromkeys(repeat.of or repeat for repeat in repeats))


class _Facts:
    """The facts about nodes that the search needs, by position."""

    def __init__(self, nodes: list[fx.Node], labels: numpy.ndarray) -> None:
        position = {node: i for i, node in enumerate(nodes)}
        self.nodes, self.labels = nodes, labels
        self.reads = [[position[n] for n in input_nodes(node)] for node in nodes]
        last_use = list(range(len(nodes)))
        for i, sources in enumerate(self.reads):
            for source in sources:
                last_use[source] = i
        self.last_use = numpy.array(last_use, dtype=numpy.int64)
        is_read = [n.op == "get_attr" for n in nodes]
        holds = [
            is_read[i] or nodes[i].op == "call_module" or any(map(is_read.__getitem__, sources))
            for i, sources in enumerate(self.reads)
        ]
        self.parameters = numpy.concatenate([[0], numpy.cumsum(holds)])
        self.scopes = [n.meta.get(SCOPE, ()) for n in nodes]
        for i in reversed(range(len(nodes) - 1)):  # a call without tensors (a size) belongs to the node that follows it
            if nodes[i].op.startswith("call") and not output_tensors(nodes[i]):
                self.scopes[i] = self.scopes[i + 1]


def _search(facts: _Facts, low: int, high: int) -> Iterator[Repeat]:
    """The repeat that folds most nodes between `low` and `high`, the block before it, and recursively those on either
    side."""
    best = _best(facts, low, high)
    if best is not None:
        before = _before(facts, best, low)
        yield from _search(facts, low, before[0].start if before else best.start)
        yield from before
        yield best
        yield from _search(facts, best.end, high)


def _best(facts: _Facts, low: int, high: int) -> Repeat | None:
    """The repeat between `low` and `high` whose folding saves most nodes (`_gain`)."""
    runs: list[tuple[int, int, int, int]] = []  # (blocks, period, first, end) of each run of equal labels
    labels = facts.labels[low:high]
    for period in _periods(labels):
        equal = labels[:-period] == labels[period:]
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate([[False], equal, [False]]).astype(numpy.int8)))
        for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - first >= period:
                count = (end - first) // period + 1
                runs.append((count, period, low + first, low + end + period))
    best: Repeat | None = None
    for count, period, first, end in sorted(runs, key=lambda f: (*_gain(f[0], f[1]), f[1], f[2])):
        if best is not None and _gain(best.count, best.period) <= _gain(count, period):
            break
        repeat = _cut(facts, period, first, end)  # may have fewer blocks, since their edges must be equal too
        if repeat is not None and (best is None or _gain(repeat.count, repeat.period) < _gain(best.count, best.period)):
            best = repeat
    return best


def _gain(count: int, period: int) -> tuple[int, int]:
    """A sort key: minus the number of nodes that folding saves, so that the least key is best.

    The first block may be decided for itself, since it may read other nodes, so it counts as half a block: two layers
    are then better than three equal projections within each.
    """
    return -period * (2 * count - 3), -period * (count - 1)


def _before(facts: _Facts, repeat: Repeat, low: int) -> list[Repeat]:
    """The stretch before a repeat, if it equals the blocks except that fewer of its tensors require gradients; it must
    not begin before `low`."""
    start = repeat.start - repeat.period
    if start < low:
        return []
    here, block = (facts.nodes[at : at + repeat.period] for at in (start, repeat.start))
    if any(_label(a, gradients=False) != _label(b, gradients=False) for a, b in zip(here, block, strict=True)):
        return []
    needs, block_needs = ([t.requires_grad for node in nodes for t in _made(node)] for nodes in (here, block))
    fewer = needs != block_needs and all(there or not own for own, there in zip(needs, block_needs, strict=True))
    is_equal = fewer and any(needs) and _checked(facts, start, repeat.period, 2) == 2
    return [Repeat(start, repeat.period, 1)] if is_equal else []


def _made(node: fx.Node) -> list[torch.Tensor]:
    return output_tensors(node) if node.op.startswith("call") else []


def _periods(labels: numpy.ndarray) -> list[int]:
    """The periods worth trying: distances between consecutive nodes of the same label; and distances d at which at
    least d nodes have the same label as the node d later. The latter finds blocks of several layers, in which every
    label occurs several times."""
    distances: set[int] = set()
    order = numpy.argsort(labels, kind="stable")
    same = labels[order][1:] == labels[order][:-1]
    gaps = (order[1:] - order[:-1])[same]
    values, counts = numpy.unique(gaps, return_counts=True)
    distances.update(values[(counts >= 2) & (values >= 2)].tolist())
    short = labels.astype(numpy.min_scalar_type(int(labels.max(initial=0))))  # small integers compare faster
    for distance in range(2, len(labels) // 2 + 1):
        if numpy.count_nonzero(short[distance:] == short[:-distance]) >= distance:
            distances.add(distance)
    return sorted(d for d in distances if d <= len(labels) // 2)


def _cut(facts: _Facts, period: int, first: int, end: int) -> Repeat | None:
    """The repeat in a run of equal labels: blocks begin where the fewest values cross from one block into the next."""
    if facts.parameters[min(first + period, end)] == facts.parameters[first]:
        return None
    ended = numpy.minimum(facts.last_use[first:end], end) + 1 - first
    crossing = -numpy.bincount(ended, minlength=end - first + 2)  # values that cross a cut before `first + index`
    crossing[1 : end - first + 1] += 1
    crossing = numpy.cumsum(crossing)
    ranked = []
    for shift in range(min(period, end - first - 2 * period + 1)):
        cut = first + shift + period
        depth = _common(facts.scopes[cut - 1], facts.scopes[cut])
        ranked.append((int(crossing[shift + period]), -((end - first - shift) // period), depth, shift))
    for _, count, _, shift in sorted(ranked)[:8]:
        checked = _checked(facts, first + shift, period, -count)
        if checked >= 2:
            return Repeat(first + shift, period, checked)
    return None


def _checked(facts: _Facts, start: int, period: int, count: int) -> int:
    """How many of the stretches, from the first on, have equal edges."""
    for i in range(1, count):
        here = start + i * period
        for k in range(period):
            mine, before = facts.reads[here + k], facts.reads[here - period + k]
            for a, b in zip(mine, before, strict=True):
                inside = a - b == period and b >= start
                outside = a == b and a < start
                first = i == 1 and b < start and here - period <= a < here
                if not (inside or outside or first):
                    return i
    return count


def _common(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _label_by_kind(node: fx.Node, label_of_kind: dict[int, Hashable]) -> Hashable:
    """The label of a node, computed once for all calls of one kind (`KIND`)."""
    kind = node.meta.get(KIND)
    if kind is None:
        return _label(node)
    if kind not in label_of_kind:
        label_of_kind[kind] = _label(node)
    return label_of_kind[kind]


def _label(node: fx.Node, *, gradients: bool = True) -> Hashable:
    """Equal for nodes that do the same to values of the same form. `gradients`: whether `requires_grad` is part of
    it."""
    value = node.meta.get(VAL)
    values = [value] if isinstance(value, (torch.Tensor, int)) else pytree.tree_leaves(value)
    forms = [
        (v.shape, v.dtype, gradients and v.requires_grad) if isinstance(v, torch.Tensor) else repr(v) for v in values
    ]
    if node.op in ("get_attr", "placeholder", "output"):
        target = node.name if node.op != "get_attr" else ""
    else:
        target = re.sub(r"\d+", "#", node.target) if node.op == "call_module" else target_name(node)  # type: ignore[arg-type]
    arguments = [frozen(a, _any_node) for a in node.args]
    options = [(name, frozen(a, _any_node)) for name, a in node.kwargs.items()]
    return (node.op, target, *arguments, None, *options, None, *forms)


def _any_node(node: fx.Node) -> Hashable:
    return None
