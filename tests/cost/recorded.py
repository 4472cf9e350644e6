"""Graphs for the tests of costs, and what a real run of the same model counts."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from autopar.cost.ops.measure import storage_id
from autopar.graph import VAL
from autopar.ops.flops import TotalFlops


class _Flat(fx.Tracer):
    """Traces into every module, so that parameters are get_attr nodes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__name__.startswith("Leaf")


class _Annotator(fx.Interpreter):
    """Runs a graph on meta tensors and stores each node's value, as the tracer does."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        n.meta[VAL] = pytree.tree_map(
            lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, value
        )
        return value


def graph_of(model: nn.Module, *shapes_or_tensors: Any) -> fx.Graph:
    """The graph of a model on the meta device, with `VAL` set for every node."""
    inputs = [torch.empty(s, device="meta") if isinstance(s, tuple) else s.to("meta") for s in shapes_or_tensors]
    traced = fx.GraphModule(model.to("meta"), _Flat().trace(model))
    _Annotator(traced).run(*inputs)
    return traced.graph


def graph_of_call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """The call node of a graph that makes one call on the given meta tensors."""
    graph = fx.Graph()

    def node(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placeholder = graph.placeholder(f"x{len(graph.nodes)}")
        placeholder.meta[VAL] = value
        return placeholder

    arguments = pytree.tree_map(node, (args, kwargs))
    call = graph.call_function(target, *arguments)
    value = target(*args, **kwargs)
    call.meta[VAL] = pytree.tree_map(
        lambda t: t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, value
    )
    outputs = range(len(call.meta[VAL])) if isinstance(call.meta[VAL], tuple) else ()
    for i in outputs:
        graph.call_function(operator.getitem, (call, i)).meta[VAL] = call.meta[VAL][i]
    return call


def counted_saved_bytes(run: Callable[[], Any], owned: list[torch.Tensor]) -> int:
    """Bytes of the storages that `saved_tensors_hooks` sees in a run, excluding those of `owned`."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = run()
    kept = {storage_id(t): t.untyped_storage().nbytes() for t in saved}
    for tensor in owned:
        kept.pop(storage_id(tensor), None)
    del value
    return sum(kept.values())


def counted_flops(run: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """FLOPs in forward and in backward of a run that returns a loss."""
    with TotalFlops() as counter:
        loss = run()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops() - forward
