"""Partial values and gradients on their way through the graph: where they come from, and where they are wanted.

Each walk passes the members once, in order or in reverse. What happens in a block is found once for all blocks that are
reached alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.members import Member, RuledBlock, RuledOp
from autopar.strategies.modes import Position

_MOST_ORIGINS = 8  # of a partial value that are told apart
_NONE: frozenset[Hashable] = frozenset()

Groups = tuple[tuple[int, ...], ...]  # of operands in which an op takes partial values together


class Ways(NamedTuple):
    """What equal nodes may pass: groups of operands of partial values, those worth asking about each with whether one
    of its operands becomes smaller; partial gradients, and of which inputs all must lead to a gain (None: it is one).
    """

    possible: Groups
    groups: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    gradient: bool
    gains: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Reach:
    """The ops that make the partial values which can reach a tensor, as names of ops; the same `inside` each block, in
    which what comes from outside is numbered."""

    origins: dict[TensorRef, frozenset[Hashable]]
    inside: dict[fx.Node, Reach]


class Origins:
    """Finds where partial values come from."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._makes: dict[tuple[RuledOp, tuple[Position, ...]], list[bool]] = {}  # by output
        self._told: dict[tuple[object, ...], Reach] = {}

    def of(
        self,
        members: Mapping[fx.Node, Member],
        positions: Mapping[fx.Node, Any],
        given: Mapping[TensorRef, frozenset[Hashable]] | None = None,
    ) -> Reach:
        """`given`: of tensors that come from elsewhere."""
        found, inside = dict(given or {}), {}
        for node, (op, tensors) in members.items():
            if isinstance(op, RuledBlock):
                inside[node] = self._through(node, op, tensors, positions[node], found)
                continue
            arriving = _NONE
            for group in self.ways[op].possible:
                arriving = arriving.union(*(found.get(tensors[i], _NONE) for i in group))
            for ref, own in zip(tensors[op.bound.inputs :], self._makes_partial(op, positions[node]), strict=True):
                origin = arriving | {node} if own else arriving
                if origin:
                    found[ref] = origin if len(origin) <= _MOST_ORIGINS else frozenset({node})
        return Reach(found, inside)

    def _through(
        self,
        node: fx.Node,
        block: RuledBlock,
        tensors: Sequence[TensorRef],
        positions: Sequence[Any],
        found: dict[TensorRef, frozenset[Hashable]],
    ) -> Reach:
        """Add what a block, here named by `node`, makes of what reaches it."""
        known = [found.get(ref, _NONE) for ref in tensors]
        arriving = _in_order(known)
        number = {origin: k for k, origin in enumerate(arriving)}
        numbered = tuple(frozenset(number[origin] for origin in some) for some in known)
        key = block, positions, numbered
        if key not in self._told:
            given = {ref: some for ref, some in zip(block.outer, numbered, strict=True) if some}
            self._told[key] = self.of(block.members, dict(zip(block.members, positions, strict=True)), given)
        reach = self._told[key]
        for ref, inner in zip(tensors, block.outer, strict=True):
            if inner in reach.origins:
                names = (arriving[o] if isinstance(o, int) else (node, o) for o in reach.origins[inner])
                found[ref] = frozenset(names)
        return reach

    def _makes_partial(self, op: RuledOp, positions: tuple[Position, ...]) -> list[bool]:
        key = op, positions
        if key not in self._makes:
            outputs = range(op.bound.inputs, len(op.bound.spots))
            self._makes[key] = [any(_leaves_summands(op.bound, p, t) for p in positions) for t in outputs]
        return self._makes[key]


def _in_order(known: Sequence[frozenset[Hashable]]) -> list[Hashable]:
    """All origins by the tensors that they reach; those that reach the same ones are as good as each other."""
    reached: dict[Hashable, list[int]] = {}
    for i, some in enumerate(known):
        for origin in some:
            reached.setdefault(origin, []).append(i)
    return sorted(reached, key=reached.__getitem__)


def _leaves_summands(bound: Bound, position: Position, output: int) -> bool:
    """Whether splitting there makes tensor number `output` partial by sum."""
    note = bound.factors[position.factor].note
    return bound.spots[output][position.factor] is None and note.join == "sum" and "whole" not in note.words


class Values:
    """Finds the groups of operands in which partial values are to pass, from the last node to the first."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._told: dict[tuple[object, ...], tuple[tuple[Groups, ...], list[bool]]] = {}

    def of(
        self,
        members: Mapping[fx.Node, Member],
        reach: Reach,
        wanted: set[TensorRef],
        alone: Callable[[TensorRef], bool],
    ) -> dict[fx.Node, Any]:
        """`wanted`: the tensors of which partial values are, which this adds to; `alone`: whether one node reads it."""
        kept: dict[fx.Node, Any] = {}
        for node in reversed(list(members)):
            op, tensors = members[node]
            if isinstance(op, RuledBlock):
                kept[node] = self._through(op, tensors, reach.inside[node], wanted)
                continue
            groups = []
            for group, smaller in self.ways[op].groups:
                arriving = [i for i in group if tensors[i] in reach.origins]
                if not arriving:
                    continue
                merges = len(arriving) > 1 and len({reach.origins[tensors[i]] for i in arriving}) > 1
                single = {i for i in arriving if alone(tensors[i])}  # else it is joined for others anyway
                shrinks = any(less and i in single for i, less in zip(group, smaller, strict=True))
                if merges or shrinks or (single and any(ref in wanted for ref in tensors[op.bound.inputs :])):
                    groups.append(group)
                    wanted.update(tensors[i] for i in arriving)
            kept[node] = tuple(groups)
        return kept

    def _through(
        self, block: RuledBlock, tensors: Sequence[TensorRef], reach: Reach, wanted: set[TensorRef]
    ) -> tuple[Groups, ...]:
        flags = tuple([ref in wanted for ref in tensors])
        key = block, reach, flags
        if key not in self._told:
            inner = {ref for ref, flag in zip(block.outer, flags, strict=True) if flag}
            kept = self.of(block.members, reach, inner, block.alone.__contains__)
            self._told[key] = tuple(kept[node] for node in block.members), [ref in inner for ref in block.outer]
        found, after = self._told[key]
        wanted.update(ref for ref, flag in zip(tensors, after, strict=True) if flag)
        return found


class Gradients:
    """Finds the ops through which partial gradients are to pass, from the first node to the last."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._told: dict[tuple[object, ...], tuple[tuple[bool, ...], list[bool]]] = {}

    def of(self, members: Mapping[fx.Node, Member], leads: set[TensorRef]) -> dict[fx.Node, Any]:
        """`leads`: the tensors whose gradients lead to a gain, which this adds to."""
        kept: dict[fx.Node, Any] = {}
        for node, (op, tensors) in members.items():
            if isinstance(op, RuledBlock):
                kept[node] = self._through(op, tensors, leads)
                continue
            gains = self.ways[op].gains
            kept[node] = self.ways[op].gradient and (gains is None or all(tensors[i] in leads for i in gains))
            if kept[node]:
                leads.update(tensors[op.bound.inputs :])
        return kept

    def _through(self, block: RuledBlock, tensors: Sequence[TensorRef], leads: set[TensorRef]) -> tuple[bool, ...]:
        flags = tuple([ref in leads for ref in tensors])
        key = block, flags
        if key not in self._told:
            inner = {ref for ref, flag in zip(block.outer, flags, strict=True) if flag}
            kept = self.of(block.members, inner)
            self._told[key] = tuple(kept[node] for node in block.members), [ref in inner for ref in block.outer]
        found, after = self._told[key]
        leads.update(ref for ref, flag in zip(tensors, after, strict=True) if flag)
        return found
