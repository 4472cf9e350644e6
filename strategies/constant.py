"""Constants: what is the same whatever the model is given."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import VAL, output_tensors, tensor_inputs
from autopar.strategies.table import entry

LARGE = 16 << 20
"""Bytes of a constant from which it is split as other tensors are."""

_FILLINGS = {torch.zeros, torch.ones, torch.full, torch.empty}


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that no input and no trainable tensor reaches: buffers, factories and what is computed from them.

    But not a tensor of one number that other ops read alone: it may be as large as these, and is split with them. Nor
    what is large and under a rule, such as a mask for all rows of a batch: a rank computes the part that it reads.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "call_module"):
            continue
        value = node.meta.get(VAL)
        if isinstance(value, torch.Tensor) and value.requires_grad:  # nearly always
            continue
        if any(t.requires_grad for t in output_tensors(node)) or (node.op == "get_attr" and _is_parameter(node)):
            continue
        if all(ref.node in found for ref in tensor_inputs(node)):
            found.add(node)
    found -= {node for node in found if node.op != "get_attr" and _bytes(node) > LARGE and entry(node) is not None}
    return found - {node for node in found if node.target in _FILLINGS and found.isdisjoint(node.users)}


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in output_tensors(node))


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get(VAL), torch.nn.Parameter)
