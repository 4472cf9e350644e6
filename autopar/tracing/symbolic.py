"""Tracing without examples: `torch.fx.Tracer` with our leaf rules; placeholders of fixed arguments are removed."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import REGION, SCOPE, VAL
from autopar.tracing.calls.inputs import Inputs
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.traced import Traced


class SymbolicTracer(fx.Tracer):
    """A plain `torch.fx.Tracer` whose leaves are those of a `LeafPolicy`."""

    def __init__(self, policy: LeafPolicy | None = None) -> None:
        super().__init__()
        self.policy = policy or LeafPolicy("layers")

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return self.policy.is_leaf(module, path)


def symbolic_trace(
    root: nn.Module | Callable[..., Any], concrete_args: Mapping[str, Any] | None = None
) -> tuple[fx.GraphModule, fx.Tracer]:
    """The graph of `root` as a module, and the tracer that made it. `concrete_args` as in `torch.fx.Tracer.trace`."""
    tracer = SymbolicTracer()
    graph = tracer.trace(root, dict(concrete_args) if concrete_args else None)
    name = type(root).__name__ if isinstance(root, nn.Module) else getattr(root, "__name__", "Traced")
    return fx.GraphModule(tracer.root, graph, class_name=name), tracer


def trace_without_examples(
    root: nn.Module, concrete_args: Mapping[str, Any] | None = None, policy: LeafPolicy | None = None
) -> Traced:
    """As `trace`, but without values of inputs; arguments with defaults that are no tensors are fixed to these."""
    signature = inspect.signature(root.forward)
    fixed = {
        n: p.default
        for n, p in signature.parameters.items()
        if p.default is not p.empty and not isinstance(p.default, torch.Tensor)
    }
    fixed.update(concrete_args or {})
    graph = SymbolicTracer(policy).trace(root, fixed or None)
    _drop_fixed(graph, fixed)
    for node in graph.nodes:
        node.meta.update({VAL: None, SCOPE: (), REGION: ()})
    output = graph.output_node()
    leaves, spec = pytree.tree_flatten(fx.node.map_aggregate(output.args[0], lambda v: v))
    output.args = (tuple(leaves),)
    return Traced(graph, root, Inputs(signature, {}, fixed), spec)


def _drop_fixed(graph: fx.Graph, fixed: Mapping[str, Any]) -> None:
    """Remove the placeholders of fixed arguments, and the assertions about them."""
    for node in list(graph.nodes):
        if node.op == "placeholder":
            node.args = ()
        if node.op == "placeholder" and node.target.removesuffix("_1") in fixed:
            for user in list(node.users):
                if (
                    user.target in (operator.eq, torch._assert)
                    or getattr(user.target, "__name__", "") == "_assert_is_none"
                ):
                    for assertion in list(user.users):
                        graph.erase_node(assertion)
                    graph.erase_node(user)
            if not node.users:
                graph.erase_node(node)
