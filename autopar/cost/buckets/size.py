"""The size of a bucket: the bytes of its parameters as ops read them, that is, after the gather."""

from __future__ import annotations

from autopar.cluster import Cluster
from autopar.cost.collectives import gather_fills

BUCKET_BYTES = 64 << 20
"""Bytes of a full bucket on a few nodes: large enough that latency is a small part of its time, and small enough that
so is the last reduction, which nothing hides."""
LEAST_PART = 25 / 64
"""Neighbouring small blocks share a bucket as long as it has no more than this part of a full one: mostly 25 MiB, as in
DistributedDataParallel."""
TINY_PART = 1 / 40
"""The most that a bucket has, as a part of a full one, if it joins tiny buckets of several blocks: mostly 1.6 MiB."""
_PART_OF_MEMORY = 1 / 128  # the largest bucket: three may be in memory at once, and be gathered in several dtypes


def bucket_bytes(cluster: Cluster) -> int:
    """`BUCKET_BYTES`, or more if on every axis latency would be most of such a bucket's time.

    Over which axes a bucket is gathered is only known in the plan, so the axis with the least latency counts. At most a
    128th of the device's memory.

    >>> [bucket_bytes(Cluster.preset("h100", shape)) >> 20 for shape in [(8,), (64,), (512,), (64, 8)]]
    [64, 223, 628, 64]
    """
    wanted = min((gather_fills(axis) for axis in cluster.axes if axis.size > 1), default=0.0)
    return max(BUCKET_BYTES, int(min(wanted, cluster.device.memory_bytes * _PART_OF_MEMORY)))


def most_bucket_bytes(cluster: Cluster) -> int:
    """The bytes of a bucket at most, in a region whose largest parameter has more than `bucket_bytes`.

    >>> most_bucket_bytes(Cluster.preset("h100", (8,))) >> 20
    628
    """
    return max(bucket_bytes(cluster), int(cluster.device.memory_bytes * _PART_OF_MEMORY))
