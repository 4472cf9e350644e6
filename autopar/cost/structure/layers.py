"""Layers that are alike where blocks are not, as five of six layers that attend to what is near.

Blocks may hold several layers because one of them is not quite like the others: it attends to all tokens, has no
rotary embedding, or keeps more for a cache. And where the layers are no multiple of six, those left over are blocks of
their own. What such layers have in common has the same ways to run, and decides alike here, as equal blocks do; then
blocks of six layers have hardly more decisions than blocks of one.

A layer is a module of a block, next to others of its type, of which each hands on no more tensors than the block does;
else the block is one. Which of their nodes go together, the longest common stretches tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from torch import fx

from autopar.graph import SCOPE, output_tensors

_MOST_APART = 0.25  # of the nodes of a block: outside of its layers; of layers of two blocks: without their like
_SHORTEST = 8  # nodes: shorter stretches may be like each other by chance

Layer = Sequence[int]  # the offsets of its nodes in a block


def layers_of(nodes: Sequence[fx.Node]) -> list[Layer]:
    """The layers of a block; the whole of it where it has no two."""
    inside = _modules(nodes)
    by_type: dict[str, list[Layer]] = {}
    for (_, kind), mine in inside.items():
        by_type.setdefault(kind, []).append(mine)
    layers = max(by_type.values(), key=lambda some: sum(map(len, some)), default=[])
    whole: list[Layer] = [range(len(nodes))]
    if len(layers) < 2 or sum(map(len, layers)) < (1 - _MOST_APART) * len(nodes):
        return whole
    handed_on = _handed_on(nodes)
    return layers if all(handed_on[layer[-1] + 1] <= handed_on[len(nodes)] for layer in layers) else whole


def pairs(one: Sequence[Hashable], other: Sequence[Hashable], *, nearly_all: bool = False) -> Iterator[tuple[int, int]]:
    """Nodes of two layers that are like each other, given what is equal for those that are; none unless `nearly_all`
    are, if that is asked."""
    found = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    some = [match for match in found if match.size >= _SHORTEST]
    if nearly_all and sum(match.size for match in some) < (1 - _MOST_APART) * max(len(one), len(other)):
        return
    for match in some:
        yield from zip(range(match.a, match.a + match.size), range(match.b, match.b + match.size), strict=True)


def _modules(nodes: Sequence[fx.Node]) -> Mapping[tuple[str, str], list[int]]:
    """The outermost modules, path and type, of which a block has several, with their nodes; none where too many nodes
    are in none."""
    scopes = [node.meta.get(SCOPE, ()) for node in nodes]
    depth = 0
    while True:
        inside: dict[tuple[str, str], list[int]] = {}
        for i, scope in enumerate(scopes):
            if len(scope) > depth:
                inside.setdefault(scope[depth], []).append(i)
        if sum(map(len, inside.values())) < (1 - _MOST_APART) * len(nodes):
            return {}
        if len(inside) > 1:
            return inside
        depth += 1


def _handed_on(nodes: Sequence[fx.Node]) -> list[int]:
    """Before each offset, and behind the last: how many tensors that the block made so far are read from there on."""
    offsets = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for i, node in enumerate(nodes):
        if node.op.startswith("call") and output_tensors(node):
            last = max((offsets.get(user, len(nodes)) for user in node.users if user.op != "output"), default=i)
            change[i + 1] += 1
            change[last + 1] -= 1
    return list(itertools.accumulate(change[:-1]))
