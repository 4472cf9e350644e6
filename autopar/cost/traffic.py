"""The collectives that a plan announces, found by walking the graph as the runtime does.

A tensor is converted to a wanted layout where that is first needed, once outside recomputed segments and once inside
each segment that needs it. A replay runs a segment again as far as its last node that saves something. Gradients of
parameters are reduced once a step, everything else once a micro-batch. A parameter that is gathered again pays that
for every saved use outside segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.collectives import collective_seconds
from autopar.cost.memory import StepMemory
from autopar.graph import TensorRef, tensor_of
from autopar.layout import Layout
from autopar.plans import Collective, ParameterPlan, Segment
from autopar.reshard import Move, steps

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy

Call = tuple[str, int, int, str, str]  # kind, axis, bytes, phase, cause


def conversion_moves(
    ref: TensorRef, source: Layout, wanted: Layout, mesh_shape: tuple[int, ...], *, needs_grad: bool
) -> tuple[list[Move], list[Move]]:
    """The collectives that turn `ref` from `source` into `wanted`: forward, backward.

    Raises LayoutError where that is impossible.
    """
    path = steps(source, wanted, tuple(tensor_of(ref).shape), mesh_shape, needs_grad=needs_grad)
    return [s.forward for s in path if s.forward], [s.backward for s in reversed(path) if s.backward]


def reduction_dtype(memory: StepMemory, ref: TensorRef) -> torch.dtype:
    """The dtype in which gradients of `ref` travel."""
    own = tensor_of(ref).dtype
    return memory.precision.reduction or own if memory.is_parameter(ref.node) and own.is_floating_point else own


def needs_grad(memory: StepMemory, ref: TensorRef) -> bool:
    """Whether a gradient comes back for `ref`."""
    return memory.train and tensor_of(ref).requires_grad


def gradient_enters(memory: StepMemory, node: fx.Node, ref: TensorRef) -> bool:
    """Whether a gradient comes back from `node` into its input `ref`, as far as the graph's own backward goes.

    Backward starts at the loss, the scalar among the outputs: nothing enters through what is returned beside it.
    """
    if node.op != "output":
        return needs_grad(memory, ref)
    beside = any(not tensor_of(one).dim() and needs_grad(memory, one) for one in memory.inputs[node])
    return needs_grad(memory, ref) and not (beside and tensor_of(ref).dim())


def in_segment(node: fx.Node) -> bool:
    """Whether a node within a segment's positions belongs to it: inputs and parameters stay outside."""
    return node.op not in ("placeholder", "get_attr", "output")


def replay_end(memory: StepMemory, nodes: Sequence[fx.Node]) -> int:
    """How many of a segment's nodes a replay runs: those up to the last one that saves something."""
    return max((i + 1 for i, node in enumerate(nodes) if in_segment(node) and memory.saves(node)), default=0)


def announced(
    memory: StepMemory,
    cluster: Cluster,
    chosen: Mapping[fx.Node, Strategy],
    parameters: Mapping[str, ParameterPlan],
    segments: Sequence[Segment],
) -> tuple[Collective, ...]:
    """Every collective of one optimizer step, per device, equal ones counted together."""
    nodes = list(memory.graph.nodes)
    segment_of: dict[fx.Node, int] = {}
    replayed: set[fx.Node] = set()
    for number, segment in enumerate(segments):
        inside = nodes[segment.first : segment.last + 1]
        segment_of.update((node, number) for node in inside if in_segment(node))
        replayed.update(node for node in inside[: replay_end(memory, inside)] if in_segment(node))
    calls: Counter[Call] = Counter()
    paid: set[tuple[TensorRef, Layout, int | None]] = set()
    many = memory.micro_batches
    for node in nodes:
        if node not in chosen:
            continue
        saved_inputs = memory.saved(node)[0]
        for i, (ref, wanted) in enumerate(zip(memory.inputs[node], chosen[node].inputs, strict=True)):
            parameter = parameters.get(str(ref.node.target)) if memory.is_parameter(ref.node) else None
            source = parameter.storage if parameter else chosen[ref.node].outputs[ref.index]
            grad = needs_grad(memory, ref)
            source, wanted = (source, wanted) if grad else (source.value(), wanted.value())
            forward, backward = conversion_moves(ref, source, wanted, memory.mesh_shape, needs_grad=grad)
            size = tensor_of(ref).dtype.itemsize
            name = "activations" if parameter is None else f"parameter {parameter.name}"
            if parameter and parameter.regather and i in saved_inputs and node not in segment_of:
                for move in forward:
                    calls[move.kind, move.axis, move.elements * size, "backward", name] += many
            if (ref, wanted, segment_of.get(node)) in paid:
                continue
            paid.add((ref, wanted, segment_of.get(node)))
            for move in forward:
                calls[move.kind, move.axis, move.elements * size, "forward", name] += many
                if node in replayed:
                    calls[move.kind, move.axis, move.elements * size, "replay", name] += many
            size, times = (size, many) if parameter is None else (reduction_dtype(memory, ref).itemsize, 1)
            if not gradient_enters(memory, node, ref):
                continue
            for move in backward:
                calls[move.kind, move.axis, move.elements * size, "backward", name] += times
        for inner in chosen[node].inner:
            if inner.forward_bytes:
                calls[inner.kind, inner.axis, inner.forward_bytes, "forward", "ops"] += many
                if node in replayed:
                    calls[inner.kind, inner.axis, inner.forward_bytes, "replay", "ops"] += many
            if inner.backward_bytes and memory.train:
                calls[inner.kind, inner.axis, inner.backward_bytes, "backward", "ops"] += many
    found = []
    for (kind, axis, size, phase, cause), count in calls.items():
        if cluster.axes[axis].size > 1:
            seconds = count * collective_seconds(kind, size, cluster.axes[axis])
            found.append(Collective(kind, axis, size, count, seconds, phase, cause))
    return tuple(found)
