"""Removing slices and copies that change nothing."""

from __future__ import annotations

import sys

import torch
from torch import fx


def remove_unnecessary_slices(graph: fx.Graph) -> int:
    """Replace full-range `aten.slice` by its input, and `copy_` of equal shape into a dead target by its source.

    Returns how many nodes were removed. For the copies, nodes need `val`.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    removed = 0
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.slice.Tensor and _is_whole(node):
            source = node.args[0]
        elif node.target is torch.ops.aten.copy_.default and _is_last_use(node, order):
            source = node.args[1]
        else:
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        removed += 1
    return removed


def _is_whole(node: fx.Node) -> bool:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    step = node.args[4] if len(node.args) > 4 else 1
    to_the_end = end is None or (isinstance(end, int) and end >= sys.maxsize)
    return bool(start in (0, None) and to_the_end and step == 1)


def _is_last_use(node: fx.Node, order: dict[fx.Node, int]) -> bool:
    target, source = node.args[0], node.args[1]
    if not isinstance(target, fx.Node) or not isinstance(source, fx.Node):
        return False
    shapes = [getattr(n.meta.get("val"), "shape", None) for n in (target, source)]
    later = any(order.get(user, 0) > order[node] for user in target.users if user is not node)
    return shapes[0] is not None and shapes[0] == shapes[1] and not later
