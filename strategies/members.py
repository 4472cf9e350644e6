"""Dataflow analyses over the nodes that have a rule: their members, and the fixpoint iteration that they share.

A member is a single node, or a whole block of a repeat. A block is one member, so that the result of the analysis
inside a block is computed once and reused for every equal block that the same sets of facts enter. The tensors of a
block member are those that nodes outside the block make or read too.
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
    """What equal nodes share: the bound rule, the facts of the tensors (inputs, then outputs), whether the op is an
    anchor, and whether the rule is from the built-in table. Compared by identity, so that it is a cheap cache key."""

    bound: Bound
    facts: tuple[TensorFact, ...]
    anchor: bool
    of_table: bool


@dataclass(frozen=True, eq=False)
class RuledBlock:
    """What equal blocks share: the members of one of them. `outer`: the tensors that are made or read outside the block
    too; `alone`: the tensors that exactly one node reads. An analysis result for a block is a tuple with one entry for
    each of its members."""

    members: Mapping[fx.Node, Member]
    outer: tuple[TensorRef, ...]
    alone: frozenset[TensorRef]

    @cached_property
    def touching(self) -> dict[TensorRef, list[fx.Node]]:
        return touching_nodes(self.members)


class Member(NamedTuple):
    """A node, or a block (which its first node stands for): what it shares with equal ones, and its own tensors (of a
    node: inputs, then outputs; of a block: in the order of `RuledBlock.outer`)."""

    op: RuledOp | RuledBlock
    tensors: tuple[TensorRef, ...]


def each_op(op: RuledOp | RuledBlock, *results: Any) -> Iterable[tuple[Any, ...]]:
    """The op, or every op of the block, each with its own entry of the `results`."""
    if isinstance(op, RuledBlock):
        return zip((member.op for member in op.members.values()), *results, strict=True)
    return [(op, *results)]


def touching_nodes(members: Mapping[fx.Node, Member]) -> dict[TensorRef, list[fx.Node]]:
    """The nodes that read or make each tensor."""
    touching: dict[TensorRef, list[fx.Node]] = {}
    for node, member in members.items():
        for ref in dict.fromkeys(member.tensors):
            touching.setdefault(ref, []).append(node)
    return touching


class Flow:
    """A fixpoint iteration: every tensor has a set of facts, which grows along the rules until nothing changes.

    The transfer through a member is cached by what the member shares with equal ones and by the sets of its tensors.
    The sets only grow, so the order of visits does not matter, and equal blocks with equal inputs end with equal sets.
    """

    def __init__(self) -> None:
        self._same: dict[Set, Set] = {}
        self._through: dict[tuple[object, ...], tuple[Any, tuple[Set, ...]]] = {}

    def interned(self, spots: Set) -> Set:
        """The canonical object of a set (interning), so that equal sets can be compared by `is`."""
        return self._same.setdefault(spots, spots)

    def settle(
        self,
        members: Mapping[fx.Node, Member],
        touching: Mapping[TensorRef, Iterable[fx.Node]],
        sets: dict[TensorRef, Set],
        extra: Mapping[fx.Node, Any],
    ) -> dict[fx.Node, Any]:
        """Run to the fixpoint and return the result for each member. `sets` has the initial set of every tensor and is
        updated in place to the final one; `extra` is additional input for some members."""
        results: dict[fx.Node, Any] = {}
        queue = deque(members)
        waiting = set(queue)
        while queue:
            node = queue.popleft()
            waiting.discard(node)
            op, tensors = members[node]
            current = tuple(map(sets.__getitem__, tensors))
            results[node], after = self._at(op, current, extra.get(node))
            for ref, before, updated in zip(tensors, current, after, strict=True):
                if updated is not before:
                    sets[ref] = self.interned(sets[ref] | updated)
                    for other in touching[ref]:
                        if other not in waiting:
                            waiting.add(other)
                            queue.append(other)
        return results

    def _at(self, op: RuledOp | RuledBlock, current: tuple[Set, ...], extra: Any) -> tuple[Any, tuple[Set, ...]]:
        key = op, current, extra
        result = self._through.get(key)
        if result is None:
            through = self._block if isinstance(op, RuledBlock) else self.through
            result = self._through[key] = through(op, current, extra)  # type: ignore[arg-type]  # of its own kind
        return result

    def _block(self, block: RuledBlock, current: tuple[Set, ...], extra: Any) -> tuple[Any, tuple[Set, ...]]:
        sets = dict.fromkeys(block.touching, self.interned(frozenset()))
        sets.update(zip(block.outer, current, strict=True))
        extra_of = dict(zip(block.members, extra, strict=True)) if extra is not None else {}
        results = self.settle(block.members, block.touching, sets, extra_of)
        return tuple(results[node] for node in block.members), tuple(sets[ref] for ref in block.outer)

    def through(self, op: RuledOp, current: tuple[Set, ...], extra: Any) -> tuple[Any, tuple[Set, ...]]:
        """The transfer function: from the sets of an op's tensors, the result for the op and the new sets."""
        raise NotImplementedError
