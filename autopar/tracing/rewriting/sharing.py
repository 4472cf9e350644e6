"""Attributes that several modules read, such as the angles of rotary positions, are moved before the first of these.

A trace meets such an attribute inside the first module that reads it. This block would then not be recognised as equal
to the others, and would be planned, and recomputed, differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.graph import REGION, SCOPE, output_tensors


def place_shared_attributes(graph: fx.Graph) -> int:
    """Move parameters, buffers and constants that several modules read before the first of these modules.

    The modules are those directly inside the innermost module that contains all readers. Returns how many nodes were
    moved.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    stacks = [node.meta[SCOPE] for node in nodes]
    moved = 0
    for node in (node for node in nodes if node.op == "get_attr" and len(node.users) > 1):
        places = sorted(position[user] for user in node.users)
        common = _common([stacks[place] for place in places])
        first = stacks[places[0]][: len(common) + 1]
        place = position[node]
        while first != common and place and stacks[place - 1][: len(first)] == first:
            place -= 1
        if place < position[node]:
            while place and nodes[place - 1].op.startswith("call") and not output_tensors(nodes[place - 1]):
                place -= 1  # sizes belong to the block that reads them, though they are taken behind the tensor's node
            nodes[place].prepend(node)
            node.meta[SCOPE] = common
            node.meta[REGION] = _common([user.meta[REGION] for user in node.users])
            moved += 1
    return moved


def _common(paths: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The common prefix of some paths."""
    shortest = min(paths, key=len)
    differs = (i for i, part in enumerate(shortest) if any(path[i] != part for path in paths))
    return shortest[: next(differs, len(shortest))]
