"""Seconds of one node under one strategy on one device: a roofline whose compute rate depends on the local shapes.

A product of local shape (m, k) x (k, n) reaches

    efficiency / (1 + FILL / (m n max(1, k / SPLIT)) + DEPTH / k)

of the peak rate. The first term is the device that is not full: its processors work in waves of whole tiles, and on
average half of the last wave idles; FILL is half a wave's output elements, and libraries split a long k over more
processors. The second is the loop over k that has to start and to end. Where m n is far below a wave, the time becomes
that of one wave, 2 min(k, SPLIT) FILL / rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from torch import fx

from autopar.cluster import Device
from autopar.cost.node_cost import NodeCost, Work
from autopar.graph import BIAS_OF, COST
from autopar.layout import Layout

# cuda: some 100 processors with tiles of 128 x 256. cpu: register blocks inside one core's caches.
_FILL_ELEMENTS = {"cuda": 1.6e6, "cpu": 2e3}
_DEPTH = {"cuda": 64.0, "cpu": 32.0}
_SPLIT = 2048


class Sharding(Protocol):
    """What is read of a strategy (`autopar.strategies.strategy.Strategy`)."""

    @property
    def inputs(self) -> tuple[Layout, ...]: ...

    @property
    def outputs(self) -> tuple[Layout, ...]: ...

    @property
    def work(self) -> float: ...


def node_seconds(
    node: fx.Node, strategy: Sharding, device: Device, mesh_shape: tuple[int, ...] | None = None
) -> tuple[float, float]:
    """Seconds forward and backward of one annotated node under `strategy`, without its collectives.

    With `mesh_shape`, each tensor moves its local bytes: a replicated weight is read whole by every device. Without it,
    the strategy's `work` stands for every tensor.

    The addition of a split bias runs inside its product, unless that is a partial sum: the product then pays for it.
    """
    cost: NodeCost = node.meta[COST]
    work = cost.work
    if work is None:
        return 0.0, 0.0
    outputs = _mean_part(strategy.outputs, mesh_shape, strategy.work)
    inputs = [strategy.work if mesh_shape is None else _part(layout, mesh_shape) for layout in strategy.inputs]
    read = sum(size * part for size, part in zip(work.read_bytes, inputs, strict=True))
    forward_bytes = read + (cost.moved_bytes_forward - sum(work.read_bytes)) * outputs
    whole = sum(work.input_bytes) + work.output_bytes
    held = sum(size * part for size, part in zip(work.input_bytes, inputs, strict=True)) + work.output_bytes * outputs
    backward_bytes = cost.moved_bytes_backward * (held / whole if whole else 1.0)
    rate = _flops_per_s(work, strategy.work, outputs, device)
    forward = max(work.flops_forward * strategy.work / rate, forward_bytes / device.bytes_per_s)
    backward = max(work.flops_backward * strategy.work / rate, backward_bytes / device.bytes_per_s)
    forward, backward = (
        max(forward, work.kernels_forward * device.launch_seconds),
        max(backward, work.kernels_backward * device.launch_seconds),
    )
    if BIAS_OF in node.meta:
        return 0.0, backward
    if strategy.outputs and strategy.outputs[0].is_partial:
        forward += _own_addition_seconds(node, device)
    return forward, backward


def _own_addition_seconds(node: fx.Node, device: Device) -> float:
    """Forward seconds of the bias addition that cannot run inside `node`, a product that is a partial sum."""
    additions = [user.meta[COST] for user in node.users if user.meta.get(BIAS_OF) is node]
    return sum(max(cost.moved_bytes_forward / device.bytes_per_s, device.launch_seconds) for cost in additions)


def _flops_per_s(work: Work, part: float, output_part: float, device: Device) -> float:
    """Rate that the node's product reaches at its local shapes."""
    rates = device.flops_per_s
    rate = rates.get(work.dtype) or rates["float32"]
    rate *= device.efficiency * work.rate
    elements = work.output_elements * output_part
    if not work.flops_forward or not elements:
        return rate
    depth = work.flops_forward * part / (2 * elements)
    return rate * shape_efficiency(device.kind, elements, depth)


def shape_efficiency(device_kind: str, elements: float, depth: float) -> float:
    """The part of a large product's rate that one of `elements` = m n and `depth` = k reaches.

    >>> shape_efficiency("cuda", 8192 * 8192, 8192) > 0.98, shape_efficiency("cuda", 64 * 64, 8192) < 0.02
    (True, True)
    """
    fill = _FILL_ELEMENTS[device_kind] / (elements * max(1.0, depth / _SPLIT))
    return 1 / (1 + fill + _DEPTH[device_kind] / depth)


def _mean_part(layouts: Sequence[Layout], mesh_shape: tuple[int, ...] | None, work: float) -> float:
    """The part of a node's outputs that one device holds."""
    if mesh_shape is None or not layouts:
        return work
    if len(layouts) == 1:
        return _part(layouts[0], mesh_shape)
    return sum(_part(layout, mesh_shape) for layout in layouts) / len(layouts)


@lru_cache(maxsize=1 << 16)
def _part(layout: Layout, mesh_shape: tuple[int, ...]) -> float:
    """The part of a tensor that one device holds."""
    return 1.0 / layout.shards(mesh_shape)
