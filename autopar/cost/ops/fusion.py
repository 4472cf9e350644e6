"""The cost of fused ops under `torch.compile`: a chain of pointwise ops, norms and softmaxes is one kernel each way.

Inductor fuses ops without products into kernels that read each input of the chain once and write only what is read
outside of the chain. Values in between stay in registers, also those that eager autograd would save: backward
recomputes them (AOTAutograd's min-cut partitioner). The bytes are still attributed to single nodes, so that prices
belong to nodes:

- forward: a node reads those of its inputs that come from outside the chain, and writes its outputs if something
  outside reads them;
- backward: it reads the gradients of what it wrote, and its saved inputs from outside (or its saved outputs), and
  writes the gradients of inputs from outside;
- it counts as a launch where it writes.

Ops that gather or sort (embedding, indexing), ops that autopar does not know the inside of, and a bias addition that
runs in its product belong to no chain. A conversion between two nodes of a chain forces a write, which is not counted.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from autopar.cost.ops.node_cost import NodeCost
from autopar.graph import BIAS_OF, COST, TensorRef, is_getitem, output_tensors, target_name, tensor_inputs, tensor_of

_OUTSIDE = ("embedding", "index", "gather", "scatter", "take", "sort", "topk", "unique", "nonzero", "cumsum", "fft")


def fuse(graph: fx.Graph) -> None:
    """Replace the cost (`meta[COST]`) of nodes in chains by that in a compiled graph; FLOPs and saved tensors stay."""
    fused = {node for node in graph.nodes if _fusible(node)}
    sources: dict[TensorRef, TensorRef] = {}  # of views, the tensor that is viewed
    readers: dict[TensorRef, list[fx.Node]] = {}
    for node in graph.nodes:
        inputs = tensor_inputs(node)
        for ref in inputs:
            if not _view(node):
                readers.setdefault(sources.get(ref, ref), []).append(node)
        if _view(node):
            for i, input_index in enumerate(node.meta[COST].alias_of):
                if input_index is not None:
                    ref = inputs[input_index]
                    sources[TensorRef(node, i)] = sources.get(ref, ref)
    for node in fused:
        node.meta[COST] = _in_chain(node, fused, sources, readers)


def _fusible(node: fx.Node) -> bool:
    cost: NodeCost | None = node.meta.get(COST)
    if cost is None or cost.work is None or cost.work.flops_forward or cost.estimated or BIAS_OF in node.meta:
        return False
    name = target_name(node).rpartition(".")[2]
    return node.op in ("call_function", "call_method") and not any(word in name for word in _OUTSIDE)


def _view(node: fx.Node) -> bool:
    cost: NodeCost | None = node.meta.get(COST)
    return is_getitem(node) or (cost is not None and cost.work is None and any(a is not None for a in cost.alias_of))


def _in_chain(
    node: fx.Node,
    fused: set[fx.Node],
    sources: dict[TensorRef, TensorRef],
    readers: dict[TensorRef, list[fx.Node]],
) -> NodeCost:
    """The cost of a node in a chain, as the module's docstring says."""
    cost: NodeCost = node.meta[COST]
    work = cost.work
    assert work is not None
    outside = [sources.get(ref, ref).node not in fused for ref in tensor_inputs(node)]
    outputs = [TensorRef(node, i) for i in range(len(output_tensors(node)))]
    written = any(user not in fused for ref in outputs for user in readers.get(ref, ()))
    output_bytes = work.output_bytes * written
    reads = tuple(size * out for size, out in zip(work.read_bytes, outside, strict=True))
    backward = cost.moved_bytes_backward
    if backward:
        trained = [tensor_of(ref).requires_grad for ref in tensor_inputs(node)]
        entering = sum(size * out * t for size, out, t in zip(work.input_bytes, outside, trained, strict=True))
        kept = sum(size for i, size in enumerate(work.input_bytes) if outside[i] and i in cost.saved_inputs)
        if cost.saved_outputs and any(outside):
            kept += work.output_bytes
        backward = output_bytes + entering + kept
    return dataclasses.replace(
        cost,
        moved_bytes_forward=sum(reads) + output_bytes,
        moved_bytes_backward=backward,
        work=dataclasses.replace(
            work,
            read_bytes=reads,
            kernels_forward=int(written and work.kernels_forward > 0),
            kernels_backward=int(any(outside) and work.kernels_backward > 0),
        ),
    )
