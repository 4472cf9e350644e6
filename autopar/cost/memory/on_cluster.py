"""The memory of a step on a cluster: all that `StepMemory` needs to know of the hardware, in one place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.cost.buckets.size import bucket_bytes, most_bucket_bytes
from autopar.cost.memory.formulas import StepMemory
from autopar.layout import Layout
from autopar.precision import Precision


def memory_on(
    cluster: Cluster,
    graph: fx.Graph,
    parameters: Mapping[str, torch.Tensor],
    precision: Precision,
    optimizer: str,
    micro_batches: int,
    train: bool = True,
    buffers: Mapping[str, torch.Tensor] | None = None,
    pinned: Mapping[str, Layout] | None = None,
    trained: Collection[str] = (),
) -> StepMemory:
    """The `StepMemory` of a graph on a mesh, with bucket sizes that suit its links.

    `buffers`: the model's by qualified name; those that the graph does not read count too. `pinned`: layouts in which
    parameters are already stored; `trained`: parameters that other graphs of the model train.
    """
    shape, kind = cluster.shape, cluster.device.kind
    return StepMemory(
        graph,
        parameters,
        shape,
        precision,
        optimizer,
        micro_batches,
        kind,
        train,
        bucket_bytes=bucket_bytes(cluster),
        most_bucket_bytes=most_bucket_bytes(cluster),
        buffers=buffers or {},
        pinned=pinned or {},
        trained=frozenset(trained),
    )
