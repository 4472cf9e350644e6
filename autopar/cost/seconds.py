"""Seconds of one node under one strategy on one device: a roofline whose compute rate depends on the local shapes.

Three times are combined, by their maximum on a GPU and their sum on a CPU: that of the node's products at the rate that
tiles and waves leave (`cost.ops.products`), that of its bytes at the memory's rate, and that of its kernel launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from torch import fx

from autopar.cluster import Device
from autopar.cost.ops.node_cost import NodeCost, Work
from autopar.cost.ops.products import columns_cut, product_seconds
from autopar.graph import BIAS_OF, COST
from autopar.layout import Layout

_PASSES_BACKWARD = 2
"""How often backward moves each of an op's inputs and outputs, as values or gradients. What it moves beyond that is
attributed to intermediate tensors."""


class Sharding(Protocol):
    """The fields of `autopar.strategies.strategy.Strategy` that are used here."""

    @property
    def inputs(self) -> tuple[Layout, ...]: ...

    @property
    def outputs(self) -> tuple[Layout, ...]: ...

    @property
    def work(self) -> float: ...


def node_seconds(
    node: fx.Node, strategy: Sharding, device: Device, mesh_shape: tuple[int, ...] | None = None
) -> tuple[float, float]:
    """Forward and backward seconds of one annotated node under `strategy`, without its collectives.

    With `mesh_shape`, each tensor counts with its local bytes: every device reads a replicated weight whole. Without
    it, the bytes of all tensors are scaled by the strategy's `work`; bytes of intermediate tensors (the logarithms of a
    loss) always are.

    A bias addition that was split from a product costs nothing in forward, since it runs inside the product. If the
    product is a partial sum, it cannot, and the product is charged for it.
    """
    cost: NodeCost = node.meta[COST]
    work = cost.work
    if work is None:
        return 0.0, 0.0
    outputs = _mean_part(strategy.outputs, work.output_shapes, mesh_shape, strategy.work)
    if mesh_shape is None:
        inputs = [strategy.work] * len(strategy.inputs)
    else:
        pairs = zip(strategy.inputs, work.input_shapes, strict=True)
        inputs = [_part(layout, shape, mesh_shape) for layout, shape in pairs]
    read = sum(size * part for size, part in zip(work.read_bytes, inputs, strict=True))
    written = min(cost.moved_bytes_forward - sum(work.read_bytes), work.output_bytes)
    within = cost.moved_bytes_forward - sum(work.read_bytes) - written  # of intermediate tensors
    forward_bytes = read + written * outputs + within * strategy.work
    whole = sum(work.input_bytes) + work.output_bytes
    held = sum(size * part for size, part in zip(work.input_bytes, inputs, strict=True)) + work.output_bytes * outputs
    own = min(cost.moved_bytes_backward, _PASSES_BACKWARD * whole)
    backward_bytes = own * (held / whole if whole else 1.0) + (cost.moved_bytes_backward - own) * strategy.work
    products = _products(work, strategy, outputs, inputs, device, mesh_shape) if work.flops_forward else (0.0, 0.0)
    forward, backward = (
        device.together(products[way], moved / device.bytes_per_s, kernels * device.launch_seconds)
        for way, (moved, kernels) in enumerate(
            ((forward_bytes, work.kernels_forward), (backward_bytes, work.kernels_backward))
        )
    )
    if BIAS_OF in node.meta:
        return 0.0, backward
    if strategy.outputs and strategy.outputs[0].is_partial:
        forward += _own_addition_seconds(node, device)
    return forward, backward


def _own_addition_seconds(node: fx.Node, device: Device) -> float:
    """Forward seconds of the bias addition that cannot run inside `node`, a product that is a partial sum."""
    additions = split_biases_of(node)
    return sum(max(cost.moved_bytes_forward / device.bytes_per_s, device.launch_seconds) for cost in additions)


def split_biases_of(node: fx.Node) -> list[NodeCost]:
    """The costs of the bias additions that were split from a product."""
    return [user.meta[COST] for user in node.users if user.meta.get(BIAS_OF) is node]


def _products(
    work: Work,
    strategy: Sharding,
    output_part: float,
    input_parts: Sequence[float],
    device: Device,
    mesh_shape: tuple[int, ...] | None,
) -> tuple[float, float]:
    """Forward and backward seconds of the node's products, without the time for bytes and launches."""
    peak = device.flops_per_s.get(work.dtype) or device.flops_per_s["float32"]
    return product_seconds(
        work,
        peak * device.efficiency * (device.attention if work.attention else 1.0),
        device.kind,
        device.processors,
        part=strategy.work,
        output_part=output_part,
        columns_cut=columns_cut(strategy.outputs, work, mesh_shape),
        second_part=input_parts[1] if len(input_parts) > 1 else 1.0,
    )


def _mean_part(
    layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]], mesh_shape: tuple[int, ...] | None, work: float
) -> float:
    """The part of a node's outputs that one device holds, on average over the outputs."""
    if mesh_shape is None or not layouts:
        return work
    if len(layouts) == 1:
        return _part(layouts[0], shapes[0], mesh_shape)
    parts = [_part(layout, shape, mesh_shape) for layout, shape in zip(layouts, shapes, strict=True)]
    return sum(parts) / len(parts)


@lru_cache(maxsize=1 << 16)
def _part(layout: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> float:
    """The part of a tensor that the device with the largest shard holds."""
    if layout.is_legal(shape, mesh_shape):
        return 1.0 / layout.shards(mesh_shape)
    return math.prod(layout.local_shape(shape, mesh_shape)) / math.prod(shape)
