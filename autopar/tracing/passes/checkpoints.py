"""Writes checkpoint regions back as calls of `torch.utils.checkpoint`."""

from __future__ import annotations

import operator
from typing import Any

import torch.utils.checkpoint
from torch import fx, nn

from autopar.graph import REGION
from autopar.tracing.traced import Traced


def emit_checkpoints(traced: Traced) -> fx.GraphModule:
    """A module that computes the trace with a checkpoint call around each of its regions, including nested ones."""
    attributes = {
        str(n.target): traced.attribute(str(n.target))
        for n in traced.graph.nodes
        if n.op in ("get_attr", "call_module")
    }
    graph = fx.Graph()
    _fill(attributes, graph, list(traced.graph.nodes), 0, {})
    graph.set_codegen(traced.gm.graph._codegen)
    return fx.GraphModule(attributes, graph, class_name=type(traced.root).__name__)


class Checkpointed(nn.Module):
    """A region: its body runs under `torch.utils.checkpoint.checkpoint`."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.body, *inputs, use_reentrant=False)


def _fill(
    attributes: dict[str, Any], graph: fx.Graph, nodes: list[fx.Node], depth: int, copies: dict[fx.Node, fx.Node]
) -> None:
    """Copy `nodes` into `graph`; each run of nodes in one region at `depth` becomes a submodule that is called."""
    position = 0
    while position < len(nodes):
        node = nodes[position]
        region = node.meta[REGION][: depth + 1] if len(node.meta[REGION]) > depth else None
        if region is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            position += 1
            continue
        members = [n for n in nodes[position:] if n.meta[REGION][: depth + 1] == region]
        last = max(i for i, n in enumerate(nodes) if n in set(members))
        run = nodes[position : last + 1]
        between = [n for n in run if n not in set(members)]
        for other in between:  # size and attribute nodes outside the region
            copies[other] = graph.node_copy(other, copies.__getitem__)
        _call_region(attributes, graph, members, depth, copies, "_".join(map(str, region)))
        position = last + 1


def _call_region(
    attributes: dict[str, Any],
    graph: fx.Graph,
    members: list[fx.Node],
    depth: int,
    copies: dict[fx.Node, fx.Node],
    name: str,
) -> None:
    """Make a `Checkpointed` submodule of a region's nodes, and call it in `graph`."""
    inside = set(members)
    inputs = list(dict.fromkeys(i for n in members for i in n.all_input_nodes if i not in inside))
    outputs = [n for n in members if any(user not in inside for user in n.users)]
    body = fx.Graph()
    inner = {n: body.placeholder(n.name) for n in inputs}
    _fill(attributes, body, members, depth + 1, inner)
    body.output(tuple(inner[n] for n in outputs))
    attributes[f"checkpoint_{name}"] = Checkpointed(fx.GraphModule(attributes, body))
    call = graph.call_module(f"checkpoint_{name}", tuple(copies[n] for n in inputs))
    for index, node in enumerate(outputs):
        copies[node] = graph.call_function(operator.getitem, (call, index))
