"""Makes a one-op graph from a call on real tensors, so that the op's node can be inspected and run."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import VAL


def callable_of(node: fx.Node) -> Any:
    """The torch function behind a node."""
    return getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target


def example(target: Any, /, *args: Any, **kwargs: Any) -> tuple[fx.Node, list[torch.Tensor]]:
    """A graph of one op on real tensors: its node with data-free values, and the tensors in the order of its arguments.

    `target` is a torch function or the name of a tensor method.
    """
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        node = graph.placeholder(f"t{len(tensors)}")
        node.meta[VAL] = _meta(value)
        return node

    lifted = torch.utils._pytree.tree_map(lift, (list(args), kwargs))
    make = graph.call_method if isinstance(target, str) else graph.call_function
    node = make(target, tuple(lifted[0]), lifted[1])
    copies = iter([t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
    whole = fx.node.map_arg((node.args, node.kwargs), lambda _: next(copies))
    result = callable_of(node)(*whole[0], **whole[1])
    node.meta[VAL] = torch.utils._pytree.tree_map(lambda v: _meta(v) if isinstance(v, torch.Tensor) else v, result)
    return node, tensors


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
