"""Corrects strides and shared storages to those of the target device, where its kernels' differ from the meta device's.

Fused attention gives its output the strides of its query, mostly (batch, sequence, heads, head dim) in memory. Merging
the heads, a copy on the meta device, is then a view, so that one tensor is saved for backward and not two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.cost.ops.calls import NoDataError, arguments, callable_of, data_free
from autopar.cost.ops.kernels import has_row, kernel
from autopar.cost.ops.measure import storage_id
from autopar.graph import VAL, TensorRef, is_getitem, output_tensors, resolve, tensor_inputs, tensor_of


def correct_strides(graph: fx.Graph, device_kind: str, root: nn.Module | None) -> None:
    """Replace VAL by tensors with the device's strides, and propagate these through all ops that read such a tensor."""
    changed: set[TensorRef] = set()
    holders: set[fx.Node] = set()  # the nodes that make or select a changed tensor
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        reads = not holders.isdisjoint(node.all_input_nodes)
        if is_getitem(node):
            if reads and changed.intersection(resolve(node)):
                source, key = node.args
                assert isinstance(source, fx.Node)
                node.meta[VAL] = source.meta[VAL][key]
                holders.add(node)
        elif ((has_own := has_row(node.target, device_kind)) or reads) and output_tensors(node):
            refs = tensor_inputs(node)
            news = _run_again(node, refs, root) if changed.intersection(refs) else set()
            if has_own:
                news |= _lay_out(node, refs, device_kind)
            if news:
                changed |= news
                holders.add(node)


def _run_again(node: fx.Node, refs: Sequence[TensorRef], root: nn.Module | None) -> set[TensorRef]:
    """Run a node again on its corrected inputs; returns the outputs whose strides or storages have changed."""
    args, kwargs = arguments(node, {ref: tensor_of(ref).detach() for ref in refs})
    call, _ = callable_of(node, root)
    try:
        with torch.no_grad(), data_free(node):
            value = call(*args, **kwargs)
    except NoDataError:
        return set()  # the outputs stay as traced, and the node's cost will be an estimate
    outputs = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
    before = output_tensors(node)
    if len(outputs) != len(before):
        return set()
    shared = {storage_id(tensor_of(ref)) for ref in refs}
    news = {
        i: new
        for i, (old, new) in enumerate(zip(before, outputs, strict=True))
        if storage_id(new) in shared or new.stride() != old.stride()
    }
    return _replace(node, news)


def _lay_out(node: fx.Node, refs: Sequence[TensorRef], device_kind: str) -> set[TensorRef]:
    """Give an op's output the strides of the device's kernel, if there is a row for it."""
    outputs = output_tensors(node)
    row = kernel(node.target, device_kind, outputs, *arguments(node, {ref: tensor_of(ref) for ref in refs}))
    if row is None or row.output is None or row.output.stride() == outputs[0].stride():
        return set()
    return _replace(node, {0: row.output})


def _replace(node: fx.Node, news: dict[int, torch.Tensor]) -> set[TensorRef]:
    """Replace some of a node's output tensors by `news`."""
    numbers = iter(range(len(output_tensors(node))))

    def one(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        new = news.get(next(numbers))
        return value if new is None else new.detach().requires_grad_(value.requires_grad)

    node.meta[VAL] = pytree.tree_map(one, node.meta[VAL])
    return {TensorRef(node, i) for i in news}
