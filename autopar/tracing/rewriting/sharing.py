"""What several modules read, such as the angles of rotary positions, stands before the first of them.

A trace meets it inside the first module that reads it. A block that holds what the others only read would not be
recognised as their equal, and would be planned, and recomputed, apart from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from autopar.graph import REGION, SCOPE, output_tensors


def place_shared_attributes(graph: fx.Graph) -> int:
    """Move parameters, buffers and constants that several modules read before the first of these modules.

    Of the modules that run inside the innermost one that all readers are in, that is the one with the first reader.
    Returns how many nodes were moved.
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
                place -= 1  # sizes are taken where a tensor is made, and are the block's that reads them
            nodes[place].prepend(node)
            node.meta[SCOPE] = common
            node.meta[REGION] = _common([user.meta[REGION] for user in node.users])
            moved += 1
    return moved


def _common(paths: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What all of some paths begin with."""
    shortest = min(paths, key=len)
    differs = (i for i, part in enumerate(shortest) if any(path[i] != part for path in paths))
    return shortest[: next(differs, len(shortest))]
