"""The nodes under a rule, as members of the flows that say where each is worth splitting, and the flows themselves.

Equal blocks of a deep model stand among the members as one each, so that what flows through a block is found once for
all blocks that it flows through alike. Such a member's tensors are those that others make or touch too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from autopar.graph import TensorRef
from autopar.strategies.bind import Bound
from autopar.strategies.modes import TensorFact

Set = frozenset[Any]


@dataclass(frozen=True, eq=False)
class RuledOp:
    """What equal nodes share: their bound rule, the facts of their tensors (inputs, then outputs), whether they are
    anchors, and whether the rule is the table's. Equality is identity: what follows from it is found once."""

    bound: Bound
    facts: tuple[TensorFact, ...]
    anchor: bool
    of_table: bool


@dataclass(frozen=True, eq=False)
class RuledBlock:
    """What equal blocks share: the members of one of them. `outer`: those of its tensors that others make or touch too;
    `alone`: those that one node reads. What is found of a block is a tuple, by member."""

    members: Mapping[fx.Node, Member]
    outer: tuple[TensorRef, ...]
    alone: frozenset[TensorRef]

    @cached_property
    def touching(self) -> dict[TensorRef, list[fx.Node]]:
        return touching_nodes(self.members)


class Member(NamedTuple):
    """A node in the flow, or a block by its first: what it shares with its like, and its tensors (of a node: inputs,
    then outputs)."""

    op: RuledOp | RuledBlock
    tensors: tuple[TensorRef, ...]


def each_op(op: RuledOp | RuledBlock, *found: Any) -> Iterable[tuple[Any, ...]]:
    """An op, or each of a block's, with what is found of it."""
    if isinstance(op, RuledBlock):
        return zip((member.op for member in op.members.values()), *found, strict=True)
    return [(op, *found)]


def touching_nodes(members: Mapping[fx.Node, Member]) -> dict[TensorRef, list[fx.Node]]:
    """The nodes that read or make each tensor."""
    found: dict[TensorRef, list[fx.Node]] = {}
    for node, member in members.items():
        for ref in dict.fromkeys(member.tensors):
            found.setdefault(ref, []).append(node)
    return found


class Flow:
    """Sets of tensors that grow along the rules until nothing changes.

    What they do at a member is found once for equal ones whose tensors have the same sets: these only grow, so that the
    order of visits does not matter, and equal blocks end with equal ones.
    """

    def __init__(self) -> None:
        self._same: dict[Set, Set] = {}
        self._through: dict[tuple[object, ...], tuple[Any, tuple[Set, ...]]] = {}

    def same(self, some: Set) -> Set:
        """The one object for a set."""
        return self._same.setdefault(some, some)

    def settle(
        self,
        members: Mapping[fx.Node, Member],
        touching: Mapping[TensorRef, Iterable[fx.Node]],
        sets: dict[TensorRef, Set],
        given: Mapping[fx.Node, Any],
    ) -> dict[fx.Node, Any]:
        """What is found of each member once nothing changes; `sets`, to begin with and then in the end, are those of
        all tensors, and `given` what is known of members."""
        found: dict[fx.Node, Any] = {}
        queue = deque(members)
        waiting = set(queue)
        while queue:
            node = queue.popleft()
            waiting.discard(node)
            op, tensors = members[node]
            known = tuple(map(sets.__getitem__, tensors))
            found[node], after = self._at(op, known, given.get(node))
            for ref, before, now in zip(tensors, known, after, strict=True):
                if now is not before:
                    sets[ref] = self.same(sets[ref] | now)
                    for other in touching[ref]:
                        if other not in waiting:
                            waiting.add(other)
                            queue.append(other)
        return found

    def _at(self, op: RuledOp | RuledBlock, known: tuple[Set, ...], given: Any) -> tuple[Any, tuple[Set, ...]]:
        key = op, known, given
        found = self._through.get(key)
        if found is None:
            through = self._block if isinstance(op, RuledBlock) else self.through
            found = self._through[key] = through(op, known, given)  # type: ignore[arg-type]  # of its own kind
        return found

    def _block(self, block: RuledBlock, known: tuple[Set, ...], given: Any) -> tuple[Any, tuple[Set, ...]]:
        sets = dict.fromkeys(block.touching, self.same(frozenset()))
        sets.update(zip(block.outer, known, strict=True))
        told = dict(zip(block.members, given, strict=True)) if given is not None else {}
        found = self.settle(block.members, block.touching, sets, told)
        return tuple(found[node] for node in block.members), tuple(sets[ref] for ref in block.outer)

    def through(self, op: RuledOp, known: tuple[Set, ...], given: Any) -> tuple[Any, tuple[Set, ...]]:
        """What is found of an op whose tensors have these sets, and what sets they have then."""
        raise NotImplementedError
