"""`vmap` in an exported graph: its bookkeeping is rewritten to ordinary operations on the batched tensors.

The body of an exported `vmap` describes tensors without their batch dim. Here the batch dim becomes dim 0 and every
operation of the body is adapted: operands of pointwise ones are aligned, dims in others are increased by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_BOOKKEEPING = {"lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"}
_DIMS = {"dim", "dims", "dim0", "dim1", "source", "destination"}  # names of arguments


def remove_batch_dim_nodes(graph: fx.Graph) -> int:
    """Rewrite `_add_batch_dim` and `_remove_batch_dim`; returns how many there were.

    Raises NotImplementedError naming an operation of a body that cannot be shifted.
    """
    rank: dict[fx.Node, int] = {}  # nodes with a leading batch dim: their rank without it
    count = 0
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        with graph.inserting_before(node):
            if name == "_add_batch_dim":
                new = _to_front(graph, node.args[0], node.args[1])
                rank[new] = _rank(node.args[0]) - 1
            elif name == "_remove_batch_dim":
                new = _out(graph, node, rank)
            else:
                if any(n in rank for n in node.all_input_nodes) and node.op != "output":
                    rank[node] = _shift(graph, node, rank)
                continue
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        count += 1
    for node in reversed(list(graph.nodes)):
        if getattr(node.target, "__name__", "") in _BOOKKEEPING and not node.users:
            graph.erase_node(node)
    return count


def _to_front(graph: fx.Graph, source: Any, dim: Any) -> fx.Node:
    moved = graph.call_function(torch.ops.aten.movedim.int, (source, dim, 0)) if dim else graph.call_function(
        torch.ops.aten.alias.default, (source,)
    )  # fmt: skip
    value = source.meta.get("val")
    if value is not None:
        moved.meta["val"] = value.movedim(dim, 0)
    return moved


def _out(graph: fx.Graph, node: fx.Node, rank: dict[fx.Node, int]) -> fx.Node:
    """The result with its batch dim: expanded if the body does not depend on the batch, and moved to its place."""
    source, _, batch, dim = node.args
    assert isinstance(source, fx.Node)
    value = source.meta.get("val")
    if source not in rank:
        source = graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
    if source not in rank or (value is not None and value.shape[0] != batch and value.shape[0] == 1):
        source = graph.call_function(torch.ops.aten.expand.default, (source, [batch, *[-1] * (_rank(node) - 1)]))
    if dim:
        source = graph.call_function(torch.ops.aten.movedim.int, (source, 0, dim))
    source.meta["val"] = node.meta.get("val")
    return source


def _shift(graph: fx.Graph, node: fx.Node, rank: dict[fx.Node, int]) -> int:
    """Adapt a node to operands with a leading batch dim; returns the rank of its result without that dim."""
    target = node.target
    logical = _rank(node)
    if isinstance(target, torch._ops.OpOverload):
        if torch.Tag.pointwise in target.tags:
            node.args = fx.map_arg(node.args, lambda n: _aligned(graph, n, logical, rank))
            _widen(node, rank)
            return logical
        names = [a.name for a in target._schema.arguments]
        shifted = [i for i, n in enumerate(names) if n in _DIMS and i < len(node.args)]
        if shifted and sum(n in rank for n in node.all_input_nodes) == 1 and "size" not in names:
            source = next(n for n in node.all_input_nodes if n in rank)
            node.args = tuple(_one_further(a, rank[source]) if i in shifted else a for i, a in enumerate(node.args))
            _widen(node, rank)
            return logical
    raise NotImplementedError(f"{node.format_node()} inside vmap cannot be rewritten for a batch dim")


def _aligned(graph: fx.Graph, node: fx.Node, logical: int, rank: dict[fx.Node, int]) -> fx.Node:
    for _ in range(logical - rank[node] if node in rank else 0):
        node = graph.call_function(torch.ops.aten.unsqueeze.default, (node, 1))
    return node


def _one_further(dims: Any, rank: int) -> Any:
    if isinstance(dims, (list, tuple)):
        return [_one_further(d, rank) for d in dims]
    return dims % max(rank, 1) + 1 if isinstance(dims, int) else dims


def _widen(node: fx.Node, rank: dict[fx.Node, int]) -> None:
    """Give the node's value the leading batch dim."""
    value = node.meta.get("val")
    source = next((n.meta["val"] for n in node.all_input_nodes if n in rank and n.meta.get("val") is not None), None)
    if value is not None and source is not None:
        node.meta["val"] = torch.empty((source.shape[0], *value.shape), dtype=value.dtype, device="meta")


def _rank(node: Any) -> int:
    value = node.meta.get("val")
    if value is None:
        raise NotImplementedError(f"{node} has no example value, so its rank is not known")
    return len(value.shape)
