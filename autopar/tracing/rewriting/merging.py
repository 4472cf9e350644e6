"""Equal constants that are created in a row, such as the initial states of all layers, become one node.

If each block read a constant of its own, the blocks would not be recognised as equal, and planned separately.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from autopar.graph import AUTOCAST, GRAD_MODE, REGION, output_tensors, tensor_inputs
from autopar.tracing.rewriting.cleaning import WRITES

_CONSTANT = (torch.zeros, torch.ones, torch.full)


def merge_equal_constants(graph: fx.Graph) -> int:
    """Replace equal constants by the first of them, if only constants and numbers are between.

    Created at the same moment, one constant lives no longer than several. Constants that are outputs of the graph are
    not merged, and a graph that still has in-place writes is left alone. Returns how many nodes were erased.
    """
    if any(WRITES in node.meta for node in graph.nodes):
        return 0
    first: dict[Hashable, fx.Node] = {}
    erased = 0
    for node in list(graph.nodes):
        is_constant = node.op == "call_function" and node.target in _CONSTANT and not tensor_inputs(node)
        if not is_constant:
            if first and node.op not in ("placeholder", "get_attr") and output_tensors(node):
                first.clear()
            continue
        if any(user.op == "output" for user in node.users):
            continue
        modes = (repr(node.meta.get(name)) for name in (REGION, AUTOCAST, GRAD_MODE))
        key = (node.target, repr((node.args, node.kwargs)), *modes)
        representative = first.setdefault(key, node)
        if representative is not node:
            node.replace_all_uses_with(representative)
            graph.erase_node(node)
            erased += 1
    return erased
