"""Nearly equal layers within and across blocks, such as five of six layers that have local attention.

A block may have several layers because one of them differs a bit: it attends to all tokens, has no rotary embedding, or
keeps more for a cache. If the number of layers is no multiple of six, those left over are separate blocks. Nodes that
such layers have in common have the same strategies, and share their decisions, as equal blocks do. Blocks of six layers
then have hardly more decisions than blocks of one.

The layers of a block are its submodules of one type, if there are several, they make up most of it, and none hands on
more tensors than the block does; otherwise the whole block is one layer. The longest common stretches of two layers
tell which of their nodes correspond.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from torch import fx

from autopar.graph import SCOPE, output_tensors

_MOST_APART = 0.25  # the most of a block's nodes outside of its layers; of two layers' nodes without a counterpart
_SHORTEST = 8  # nodes of a common stretch; shorter ones may be equal by chance

Layer = Sequence[int]  # the offsets of its nodes in a block


def layers_of(nodes: Sequence[fx.Node]) -> list[Layer]:
    """The layers of a block; the whole block as one, if it has no two."""
    inside = _modules(nodes)
    by_type: dict[str, list[Layer]] = {}
    for (_, kind), offsets in inside.items():
        by_type.setdefault(kind, []).append(offsets)
    layers = max(by_type.values(), key=lambda layers_of_type: sum(map(len, layers_of_type)), default=[])
    whole: list[Layer] = [range(len(nodes))]
    if len(layers) < 2 or sum(map(len, layers)) < (1 - _MOST_APART) * len(nodes):
        return whole
    handed_on = _handed_on(nodes)
    return layers if all(handed_on[layer[-1] + 1] <= handed_on[len(nodes)] for layer in layers) else whole


def pairs(
    first: Sequence[Hashable], second: Sequence[Hashable], *, nearly_all: bool = False
) -> Iterator[tuple[int, int]]:
    """Corresponding nodes of two layers, each given as a sequence of keys that are equal for nodes which may
    correspond.

    `nearly_all`: yield nothing if more than `_MOST_APART` of the nodes have no counterpart.
    """
    matches = SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    long_matches = [match for match in matches if match.size >= _SHORTEST]
    if nearly_all and sum(match.size for match in long_matches) < (1 - _MOST_APART) * max(len(first), len(second)):
        return
    for match in long_matches:
        yield from zip(range(match.a, match.a + match.size), range(match.b, match.b + match.size), strict=True)


def _modules(nodes: Sequence[fx.Node]) -> Mapping[tuple[str, str], list[int]]:
    """The modules (path, type) at the outermost depth where the block has several, with their nodes; {} if too many
    nodes are in none of them."""
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
    """For each offset, and for the end: how many tensors that the block has made before are read from there on."""
    offsets = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for i, node in enumerate(nodes):
        if node.op.startswith("call") and output_tensors(node):
            last = max((offsets.get(user, len(nodes)) for user in node.users if user.op != "output"), default=i)
            change[i + 1] += 1
            change[last + 1] -= 1
    return list(itertools.accumulate(change[:-1]))
