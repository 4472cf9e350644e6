"""What `torch.compile` saves: chains of pointwise ops, norms and softmaxes run as one kernel each way.

Inductor fuses ops that compute no products into kernels that read what comes from outside the chain once and write what
something outside of it reads. Values in between stay in registers, also those that eager autograd would keep: backward
computes them again (the min-cut partition of AOTAutograd). Per node, with its own bytes only, so that prices stay those
of single nodes:

- forward it reads its inputs from outside the chain, and writes its outputs if something outside reads them;
- backward it reads the gradient of what it wrote and the inputs (or its saved outputs) from outside, and writes their
  gradients;
- it counts as a launch where it writes.

What gathers or sorts (embedding, indexing) and what autopar does not know the inside of is outside of every chain, as
is the bias that runs in its product. A conversion between two nodes of a chain writes after all: that is not counted.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from autopar.cost.ops.node_cost import NodeCost
from autopar.graph import BIAS_OF, COST, TensorRef, is_getitem, output_tensors, target_name, tensor_inputs, tensor_of

_OUTSIDE = ("embedding", "index", "gather", "scatter", "take", "sort", "topk", "unique", "nonzero", "cumsum", "fft")


def fuse(graph: fx.Graph) -> None:
    """Give the nodes of chains the cost (`meta[COST]`) that they have in a compiled graph; FLOPs and saved stay."""
    fused = {node for node in graph.nodes if _fusible(node)}
    sources: dict[TensorRef, TensorRef] = {}  # through views, which run nothing
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
