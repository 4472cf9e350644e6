"""Propagation of partial values and partial gradients: which ops make them, and through which ops they should pass.

Each class makes one pass over the members, in graph order or in reverse. The result for a block is cached by what
enters it, so that equal blocks are analysed once.
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

# The origins (ops) that are told apart for one tensor's partial value; a larger set counts as one new origin.
_MOST_ORIGINS = 8
_NONE: frozenset[Hashable] = frozenset()

Groups = tuple[tuple[int, ...], ...]  # each group: the operands that an op can take as partial values together


class Ways(NamedTuple):
    """What may pass through equal nodes.

    `possible`: all groups of operands that the rule allows to be partial. `groups`: those that are considered, each
    with a flag for every operand: the output is smaller than this operand. `gradient`: partial gradients may pass.
    `gains`: the inputs whose gradients must all lead to a gain for that to be worth it; None where the op itself is the
    gain, since its output is larger than its inputs.
    """

    possible: Groups
    groups: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...]
    gradient: bool
    gains: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Reach:
    """`origins`: for each tensor the names of the ops whose partial results can reach it. `inside`: the same for the
    inside of each block; there an origin outside the block is named by a number, so that equal blocks share the result.
    """

    origins: dict[TensorRef, frozenset[Hashable]]
    inside: dict[fx.Node, Reach]


class Origins:
    """Finds, for each tensor, which ops made the partial values that can reach it (forward pass)."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._makes: dict[tuple[RuledOp, tuple[Position, ...]], list[bool]] = {}  # a flag for each output
        self._cache: dict[tuple[object, ...], Reach] = {}

    def of(
        self,
        members: Mapping[fx.Node, Member],
        positions: Mapping[fx.Node, Any],
        outside: Mapping[TensorRef, frozenset[Hashable]] | None = None,
    ) -> Reach:
        """The origins of all tensors; `outside` has those of tensors that are made outside `members`."""
        origins, inside = dict(outside or {}), {}
        for node, (op, tensors) in members.items():
            if isinstance(op, RuledBlock):
                inside[node] = self._through(node, op, tensors, positions[node], origins)
                continue
            arriving = _NONE
            for group in self.ways[op].possible:
                arriving = arriving.union(*(origins.get(tensors[i], _NONE) for i in group))
            for ref, own in zip(tensors[op.bound.inputs :], self._makes_partial(op, positions[node]), strict=True):
                origin = arriving | {node} if own else arriving
                if origin:
                    origins[ref] = origin if len(origin) <= _MOST_ORIGINS else frozenset({node})
        return Reach(origins, inside)

    def _through(
        self,
        node: fx.Node,
        block: RuledBlock,
        tensors: Sequence[TensorRef],
        positions: Sequence[Any],
        origins: dict[TensorRef, frozenset[Hashable]],
    ) -> Reach:
        """Add the origins of a block's outer tensors to `origins`. The origins that enter are numbered first, so that
        the cached result does not depend on their names; `node` stands for the block in the names of its own ops."""
        entering = [origins.get(ref, _NONE) for ref in tensors]
        arriving = _in_order(entering)
        number = {origin: k for k, origin in enumerate(arriving)}
        numbered = tuple(frozenset(number[origin] for origin in numbers) for numbers in entering)
        key = block, positions, numbered
        if key not in self._cache:
            outside = {ref: numbers for ref, numbers in zip(block.outer, numbered, strict=True) if numbers}
            self._cache[key] = self.of(block.members, dict(zip(block.members, positions, strict=True)), outside)
        reach = self._cache[key]
        for ref, inner in zip(tensors, block.outer, strict=True):
            if inner in reach.origins:
                names = (arriving[o] if isinstance(o, int) else (node, o) for o in reach.origins[inner])
                origins[ref] = frozenset(names)
        return reach

    def _makes_partial(self, op: RuledOp, positions: tuple[Position, ...]) -> list[bool]:
        key = op, positions
        if key not in self._makes:
            outputs = range(op.bound.inputs, len(op.bound.spots))
            self._makes[key] = [any(_leaves_summands(op.bound, p, t) for p in positions) for t in outputs]
        return self._makes[key]


def _in_order(entering: Sequence[frozenset[Hashable]]) -> list[Hashable]:
    """All origins in an order that depends only on which tensors they reach; origins that reach the same tensors are
    interchangeable, so their order among each other does not matter."""
    reached: dict[Hashable, list[int]] = {}
    for i, origins in enumerate(entering):
        for origin in origins:
            reached.setdefault(origin, []).append(i)
    return sorted(reached, key=reached.__getitem__)


def _leaves_summands(bound: Bound, position: Position, output: int) -> bool:
    """Whether splitting at this position leaves tensor number `output` as a partial sum."""
    note = bound.factors[position.factor].note
    return bound.spots[output][position.factor] is None and note.join == "sum" and "whole" not in note.words


class Values:
    """Decides for each op in which groups of operands partial values should pass through it (reverse pass)."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._cache: dict[tuple[object, ...], tuple[tuple[Groups, ...], list[bool]]] = {}

    def of(
        self,
        members: Mapping[fx.Node, Member],
        reach: Reach,
        wanted: set[TensorRef],
        alone: Callable[[TensorRef], bool],
    ) -> dict[fx.Node, Any]:
        """`wanted`: the tensors that are worth having as partial values; this method adds to it. `alone`: whether
        exactly one node reads a tensor."""
        passing: dict[fx.Node, Any] = {}
        for node in reversed(list(members)):
            op, tensors = members[node]
            if isinstance(op, RuledBlock):
                passing[node] = self._through(op, tensors, reach.inside[node], wanted)
                continue
            groups = []
            for group, smaller in self.ways[op].groups:
                arriving = [i for i in group if tensors[i] in reach.origins]
                if not arriving:
                    continue
                merges = len(arriving) > 1 and len({reach.origins[tensors[i]] for i in arriving}) > 1
                single = {i for i in arriving if alone(tensors[i])}  # one with more readers is joined for those anyway
                shrinks = any(is_smaller and i in single for i, is_smaller in zip(group, smaller, strict=True))
                if merges or shrinks or (single and any(ref in wanted for ref in tensors[op.bound.inputs :])):
                    groups.append(group)
                    wanted.update(tensors[i] for i in arriving)
            passing[node] = tuple(groups)
        return passing

    def _through(
        self, block: RuledBlock, tensors: Sequence[TensorRef], reach: Reach, wanted: set[TensorRef]
    ) -> tuple[Groups, ...]:
        flags = tuple([ref in wanted for ref in tensors])
        key = block, reach, flags
        if key not in self._cache:
            inner = {ref for ref, flag in zip(block.outer, flags, strict=True) if flag}
            passing = self.of(block.members, reach, inner, block.alone.__contains__)
            self._cache[key] = tuple(passing[node] for node in block.members), [ref in inner for ref in block.outer]
        groups, after = self._cache[key]
        wanted.update(ref for ref, flag in zip(tensors, after, strict=True) if flag)
        return groups


class Gradients:
    """Decides through which ops partial gradients should pass (a pass in graph order, from parameters onwards)."""

    def __init__(self, ways: Mapping[RuledOp, Ways]) -> None:
        self.ways = ways
        self._cache: dict[tuple[object, ...], tuple[tuple[bool, ...], list[bool]]] = {}

    def of(self, members: Mapping[fx.Node, Member], leads: set[TensorRef]) -> dict[fx.Node, Any]:
        """`leads`: the tensors whose partial gradients lead to a gain further back; this method adds to it."""
        passing: dict[fx.Node, Any] = {}
        for node, (op, tensors) in members.items():
            if isinstance(op, RuledBlock):
                passing[node] = self._through(op, tensors, leads)
                continue
            gains = self.ways[op].gains
            passing[node] = self.ways[op].gradient and (gains is None or all(tensors[i] in leads for i in gains))
            if passing[node]:
                leads.update(tensors[op.bound.inputs :])
        return passing

    def _through(self, block: RuledBlock, tensors: Sequence[TensorRef], leads: set[TensorRef]) -> tuple[bool, ...]:
        flags = tuple([ref in leads for ref in tensors])
        key = block, flags
        if key not in self._cache:
            inner = {ref for ref, flag in zip(block.outer, flags, strict=True) if flag}
            passing = self.of(block.members, inner)
            self._cache[key] = tuple(passing[node] for node in block.members), [ref in inner for ref in block.outer]
        passes, after = self._cache[key]
        leads.update(ref for ref, flag in zip(tensors, after, strict=True) if flag)
        return passes
