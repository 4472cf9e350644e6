"""Autocast regions of exported graphs: explicit casts of a body's inputs to the dtype that it computes in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def fix_autocast(graph: fx.Graph) -> int:
    """Cast those floating inputs of autocast bodies whose readers all compute in the region's dtype.

    Returns how many regions changed.
    """
    changed = 0
    for node in graph.nodes:
        if getattr(node.target, "__name__", str(node.target)) != "wrap_with_autocast" or not node.args[2]:
            continue
        dtype, body_node, inputs = node.args[1], node.args[4], list(node.args[5:])
        body = getattr(graph.owning_module, str(body_node.target), None)
        if isinstance(body, fx.GraphModule) and _cast_inputs(graph, node, body.graph, dtype, inputs):
            node.args = (*node.args[:5], *inputs)
            changed += 1
    return changed


def _cast_inputs(graph: fx.Graph, call: fx.Node, body: fx.Graph, dtype: Any, inputs: list[Any]) -> bool:
    cast = False
    for index, placeholder in enumerate(n for n in body.nodes if n.op == "placeholder"):
        value = placeholder.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            continue
        if all(isinstance(u.meta.get("val"), torch.Tensor) and u.meta["val"].dtype == dtype for u in placeholder.users):
            with graph.inserting_before(call):
                inputs[index] = graph.call_function(torch.ops.aten.to.dtype, (inputs[index], dtype))
            placeholder.meta["val"] = inputs[index].meta["val"] = value.to(dtype)
            cast = True
    return cast
