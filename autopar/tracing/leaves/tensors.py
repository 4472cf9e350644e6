"""Leaves for the planner: a leaf's tensors appear in the graph, so that they are stored, moved and counted.

A traced leaf is a `call_module` node, which hides its parameters and buffers. Here it becomes a function of them: each
is a `get_attr` node like any other parameter, and the list of these is the leaf's first argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from autopar.graph import VAL
from autopar.leaf_calls import LeafCall
from autopar.tracing.traced import Traced

# Types whose values can be written in a graph's code.
_SHOWN: set[type] = {type(None), type(...), bool, int, float, complex, str, bytes, range}
_SHOWN |= {torch.dtype, torch.device, torch.layout, torch.memory_format}


def show_leaf_tensors(traced: Traced, parameter_dtype: torch.dtype | None = None) -> list[fx.Node]:
    """Turn every leaf into a `LeafCall` on its tensors; returns the new nodes.

    `parameter_dtype`: floating parameters have this dtype, as in `trace`.
    """
    leaves = [node for node in traced.graph.nodes if node.op == "call_module"]
    if not leaves:
        return []
    attributes = {id(traced.attribute(str(node.target))): node for node in traced.graph.nodes if node.op == "get_attr"}
    return [_shown(traced, leaf, attributes, parameter_dtype) for leaf in leaves]


def _shown(
    traced: Traced, node: fx.Node, attributes: dict[int, fx.Node], parameter_dtype: torch.dtype | None
) -> fx.Node:
    """The `LeafCall` node that replaces a leaf's node."""
    path = str(node.target)
    module = traced.attribute(path)
    names, tensors = [], []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        attribute = attributes.get(id(tensor))
        if attribute is None:
            if path in traced.constants:  # a module outside the model's tree: its tensors are the trace's own
                traced.constants[f"{path}.{name}"] = tensor
            with traced.graph.inserting_before(node):
                attribute = attributes[id(tensor)] = traced.graph.create_node("get_attr", f"{path}.{name}")
            attribute.meta.update({key: value for key, value in node.meta.items() if key != VAL})
            attribute.meta[VAL] = _data_free(tensor, parameter_dtype)
        elif node < attribute:  # first read below this leaf: move it up
            node.prepend(attribute)
        names.append(name)
        tensors.append(attribute)
    unshown: dict[str, Any] = {}

    def text_of(value: Any) -> Any:
        if type(value) in _SHOWN or isinstance(value, fx.Node):
            return value
        text = f"autopar: argument {len(unshown)}, {type(value).__name__}"
        unshown[text] = value
        return text

    args, kwargs = (fx.node.map_aggregate(arguments, text_of) for arguments in (node.args, dict(node.kwargs)))
    with traced.graph.inserting_before(node):
        call = traced.graph.call_function(LeafCall(module, path, names, unshown), (tensors, args, kwargs))
    call.meta.update(node.meta)
    node.replace_all_uses_with(call)
    traced.graph.erase_node(node)
    return call


def _data_free(tensor: torch.Tensor, parameter_dtype: torch.dtype | None) -> torch.Tensor:
    is_cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and parameter_dtype is not None
    dtype = parameter_dtype if is_cast else tensor.dtype
    free = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    return nn.Parameter(free, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else free
