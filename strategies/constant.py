"""Constants of a graph: tensors that do not depend on the model's inputs or trainable parameters."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import VAL, output_tensors, tensor_inputs
from autopar.strategies.table import entry

LARGE = 16 << 20
"""Bytes: a computed constant that is larger is sharded like other tensors, if its op has a rule."""

_FILLINGS = {torch.zeros, torch.ones, torch.full, torch.empty}


def constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that depend on no input and no trainable tensor: buffers, factories and what is computed from them.

    Two kinds are left out. A tensor filled with one number that no other constant reads: it may be as large as the
    tensors that it is combined with, and is split with them. A large tensor whose op has a rule, such as a mask for all
    rows of a batch: each rank computes the part that it reads.
    """
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "call_module"):
            continue
        value = node.meta.get(VAL)
        if isinstance(value, torch.Tensor) and value.requires_grad:  # true for nearly all nodes, and cheap to see
            continue
        if any(t.requires_grad for t in output_tensors(node)) or (node.op == "get_attr" and _is_parameter(node)):
            continue
        if all(ref.node in constant for ref in tensor_inputs(node)):
            constant.add(node)
    constant -= {
        node for node in constant if node.op != "get_attr" and _bytes(node) > LARGE and entry(node) is not None
    }
    return constant - {node for node in constant if node.target in _FILLINGS and constant.isdisjoint(node.users)}


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in output_tensors(node))


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get(VAL), torch.nn.Parameter)
