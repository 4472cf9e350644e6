"""How many bytes a bucket of parameters has, as they are read."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.collectives import gather_fills

BUCKET_BYTES = 64 << 20
"""Large enough on a few nodes that latency is a small part of the time, small enough that the last reduction, which
nothing hides, is too."""
LEAST_PART = 25 / 64
"""What the blocks of one bucket have at least of a full one, if there are so many: 25 MiB mostly, as in
DistributedDataParallel."""
TINY_PART = 1 / 40
"""What a bucket has at most of a full one that joins tiny ones of several blocks: 1.6 MiB mostly."""
_PART_OF_MEMORY = 1 / 128  # three buckets may be there at once, and be gathered in several dtypes


def bucket_bytes(cluster: Cluster) -> int:
    """`BUCKET_BYTES`, or more where every axis has so many hops that such a bucket would mostly wait for them.

    Which axes a bucket moves over is only known when its plan is, so the quickest one counts. At most a 128th of the
    device's memory.

    >>> [bucket_bytes(Cluster.preset("h100", shape)) >> 20 for shape in [(8,), (64,), (512,), (64, 8)]]
    [64, 223, 628, 64]
    """
    wanted = min((gather_fills(axis) for axis in cluster.axes if axis.size > 1), default=0.0)
    return max(BUCKET_BYTES, int(min(wanted, cluster.device.memory_bytes * _PART_OF_MEMORY)))


def most_bucket_bytes(cluster: Cluster) -> int:
    """The most that a bucket has where a region's largest parameter has more than `bucket_bytes`.

    >>> most_bucket_bytes(Cluster.preset("h100", (8,))) >> 20
    628
    """
    return max(bucket_bytes(cluster), int(cluster.device.memory_bytes * _PART_OF_MEMORY))
