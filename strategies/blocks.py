"""Makes one member (`autopar.strategies.members`) of each block of a repeat, so that equal blocks are analysed once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from autopar.cost.structure.blocks import Repeat
from autopar.graph import KIND, TensorRef, resolve
from autopar.strategies.members import Member, RuledBlock

_LEAST = 4  # blocks that a repeat must have: the first stays single nodes, the second is analysed for all that follow


class Members(NamedTuple):
    """`of`: the members, by their (first) node. `inside`: for each block member its nodes, in the order of the block's
    own members."""

    of: Mapping[fx.Node, Member]
    inside: Mapping[fx.Node, Sequence[fx.Node]]

    def nodes(self, node: fx.Node) -> Sequence[fx.Node]:
        """The nodes of a member."""
        return self.inside.get(node, (node,))


def members_with_blocks(
    nodes: Sequence[fx.Node],
    repeats: Sequence[Repeat],
    constant: Collection[fx.Node],
    one_by_one: Callable[[Sequence[fx.Node]], dict[fx.Node, Member]],
) -> Members:
    """The members of a graph in graph order. `one_by_one` makes members of single nodes; nodes in `constant` have none.

    The nodes of a repeat's first block stay single members, because this block may read other tensors than the rest.
    """
    members: dict[fx.Node, Member] = {}
    inside: dict[fx.Node, Sequence[fx.Node]] = {}
    position = {node: i for i, node in enumerate(nodes)} if repeats else {}
    at = 0
    for repeat in (repeat for repeat in repeats if repeat.count >= _LEAST):
        members.update(one_by_one(nodes[at : repeat.instance(1).start]))
        blocks = _Blocks(repeat, nodes, position, one_by_one(nodes[repeat.instance(1).start : repeat.instance(1).stop]))
        for i in range(1, repeat.count):
            span = repeat.instance(i)
            if blocks.members and blocks.is_equal(i, constant):
                first, member, own = blocks.member(i)
                members[first], inside[first] = member, own
            else:
                members.update(one_by_one(nodes[span.start : span.stop]))
        at = repeat.end
    members.update(one_by_one(nodes[at:]))
    return Members(members, inside)


class _Blocks:
    """The blocks of a repeat after the first. `members` are those of the second block, which is the model of all."""

    def __init__(
        self,
        repeat: Repeat,
        nodes: Sequence[fx.Node],
        position: Mapping[fx.Node, int],
        members: Mapping[fx.Node, Member],
    ) -> None:
        self.repeat, self.nodes, self.position, self.members = repeat, nodes, position, members
        self._places = [position[node] for node in members]
        self._tensors = list(dict.fromkeys(ref for member in members.values() for ref in member.tensors))
        read = set(self._read_elsewhere())
        self._outer = tuple(ref for ref in self._tensors if ref.node not in members or ref in read)
        self._alike: dict[frozenset[TensorRef], RuledBlock] = {}
        self._is_told = all(KIND in node.meta for node in members)

    def _read_elsewhere(self) -> Iterator[TensorRef]:
        """The second block's tensors whose counterparts in some block are read outside that block."""
        for offset, place in enumerate(self.repeat.instance(1)):
            for at in range(place, self.repeat.end, self.repeat.period):
                first, users = at - offset, self.nodes[at].users
                if any(not first <= self.position[user] < first + self.repeat.period for user in users):
                    yield from resolve(self.nodes[place])
                    break

    def _facts(self, i: int, constant: Collection[fx.Node]) -> list[tuple[int | None, bool]]:
        span = self.repeat.instance(i)
        return [(node.meta.get(KIND), node in constant) for node in self.nodes[span.start : span.stop]]

    def is_equal(self, i: int, constant: Collection[fx.Node]) -> bool:
        """Whether block `i` has the same rules as the second one: the same kinds of calls, and the same constants. That
        both are blocks of one repeat is not enough for this."""
        return self._is_told and self._facts(i, constant) == self._facts(1, constant)

    def member(self, i: int) -> tuple[fx.Node, Member, list[fx.Node]]:
        """Block `i`: its first node, its member, and its nodes."""
        distance = (i - 1) * self.repeat.period
        tensors = [self._moved(ref, distance) for ref in self._tensors]
        pairs = zip(self._tensors, tensors, strict=True)
        alone = frozenset(own for own, its in pairs if len(its.node.users) == 1)
        if alone not in self._alike:
            self._alike[alone] = RuledBlock(self.members, self._outer, alone)
        outer = tuple(self._moved(ref, distance) for ref in self._outer)
        nodes = [self.nodes[place + distance] for place in self._places]
        return nodes[0], Member(self._alike[alone], outer), nodes

    def _moved(self, ref: TensorRef, distance: int) -> TensorRef:
        at = self.position[ref.node]
        return TensorRef(self.nodes[at + distance], ref.index) if at >= self.repeat.start else ref
