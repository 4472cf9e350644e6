"""Seconds of one collective over one mesh axis, from latency and bandwidth.

Rings on n devices, each of which hands in B bytes (Thakur, Rabenseifner and Gropp, Optimization of Collective
Communication Operations in MPICH, 2005):

==============  ========================  ===========================
kind            bytes sent by a device    sequential hops
==============  ========================  ===========================
all_gather      (n - 1) B                 n - 1
reduce_scatter  (n - 1) / n B             n - 1
all_reduce      2 (n - 1) / n B           2 (n - 1)
all_to_all      (n - 1) / n B             n - 1
==============  ========================  ===========================

Over many nodes the hops of a ring take longer than its bytes, and NCCL uses trees (`Axis.tree_seconds`,
`Axis.gather_tree_seconds`), whose depth is the logarithm of the number of nodes. As in NCCL (ncclTopoTuneModel in
src/graph/tuning.cc), the fastest algorithm is taken. The tree of all_reduce is a double binary tree, which sends 2 B at
0.9 of the ring's rate (Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction and scan,
2009). The trees of all_gather and reduce_scatter, for groups with one device in each node, are parallel aggregated
trees, which send what a ring sends at 0.75 of its rate (Jeaugey, PAT: a new algorithm for all-gather and reduce-scatter
operations at scale, 2025).

The latency of a hop is that of NCCL's protocol Simple, which forwards messages in large pieces. For small messages
there is the protocol LL: it sends words of four bytes, each with a flag of four, and does not wait for whole pieces.
`_LOW_LATENCY` has the parts of a hop's latency and of the rate that remain with it, for rings and trees (the same
source). NCCL's third protocol, LL128, is not modelled: with it the all-reduces of 16 MB in
`tests/cost/measured_collectives.csv` would be further from what was measured.

It follows that, for one and the same tensor, all_reduce <= reduce_scatter + all_gather; and, where rings are the
fastest, reduce_scatter <= all_reduce. Over hundreds of nodes a small all_reduce is the faster one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from autopar.cluster import Axis, Device
from autopar.errors import InputError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_TREE_RATE = 0.9  # of the ring's rate
_GATHER_TREE_RATE = 0.75  # of the ring's rate
_LOW_LATENCY = {"ring": (0.2, 1 / 4), "tree": (0.36, 1 / 3.8)}  # parts of a hop's latency and of the rate
_LATENCY = 0.5  # how long a large enough bucket waits for its hops at most, over the time that its bytes take


def collective_seconds(kind: str, input_bytes: float, axis: Axis) -> float:
    """Seconds of one collective from start to end, if nothing else uses the axis.

    `input_bytes` is what one device hands in: its shard for an all_gather, its whole local tensor otherwise.
    An axis of one device sends nothing and takes no time.

    >>> axis = Axis("tp", 8, latency_seconds=0.0, bytes_per_s=100e9)
    >>> collective_seconds("all_reduce", 800e6, axis), collective_seconds("all_gather", 100e6, axis)
    (0.014, 0.007)
    """
    return min([fixed + input_bytes * per_byte for fixed, per_byte in _every_way(kind, axis)])


def member_seconds(kind: str, input_bytes: float, calls: float, axis: Axis) -> float:
    """The seconds of a bucket's collective that are charged to one of its members (`cost.buckets.buckets`).

    `calls`: the member's share of the bucket (the number of collectives it is charged, mostly less than one);
    `input_bytes`: what one device hands in of the member. The collective is priced as if all members handed in as many
    bytes per share; if they do, their seconds add up to those of the collective.

    >>> axis = Axis("dp", 8, latency_seconds=1e-5, bytes_per_s=100e9)
    >>> member_seconds("all_reduce", 2e6, 0.25, axis) == collective_seconds("all_reduce", 8e6, axis) / 4
    True
    """
    return calls * collective_seconds(kind, input_bytes / calls, axis) if calls else 0.0


def least_latency(kind: str, axis: Axis) -> float:
    """Seconds that a collective takes even without bytes: what is lost at least where two collectives run in place of
    one.

    >>> least_latency("all_gather", Axis("tp", 8, latency_seconds=1e-6, bytes_per_s=100e9, low_latency=False)) > 6e-6
    True
    """
    return min(fixed for fixed, _ in _every_way(kind, axis))


def gather_fills(axis: Axis) -> float:
    """The bytes that a bucket needs, as gathered, for latency to be at most a third of its all-gather's time.

    >>> round(gather_fills(Axis("dp", 512, 1e-5, 1e9)) / 1e6, 1)
    10.2
    """
    ways = [_ring("all_gather", axis), *_trees("all_gather", axis)]
    return min(_outweighing(axis.launch_seconds + hops, _LATENCY * per_byte / axis.size) for hops, per_byte, _ in ways)


def _outweighing(seconds: float, per_byte: float) -> float:
    """How many bytes take this long; infinitely many over a link of infinite rate."""
    if not seconds:
        return 0.0
    return seconds / per_byte if per_byte else math.inf


@lru_cache(maxsize=256)
def _every_way(kind: str, axis: Axis) -> tuple[tuple[float, float], ...]:
    """For each algorithm and protocol of a collective: its fixed seconds, and its seconds per byte that a device hands
    in."""
    if kind not in KINDS:
        raise InputError(f"collective {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if axis.size == 1:
        return ((0.0, 0.0),)
    ways = [_ring(kind, axis), *_trees(kind, axis)]
    found = [(axis.launch_seconds + hops, per_byte) for hops, per_byte, _ in ways]
    for hops, per_byte, shape in ways if axis.low_latency else ():
        if shape in _LOW_LATENCY:
            latency, rate = _LOW_LATENCY[shape]
            found.append((axis.launch_seconds + latency * hops, per_byte / rate))
    return tuple(found)


def _ring(kind: str, axis: Axis) -> tuple[float, float, str]:
    """The ring algorithm (of all_to_all: pairwise): seconds of the hops, seconds per byte, and its key in
    `_LOW_LATENCY`."""
    n, hops = axis.size, (axis.size - 1) * axis.latency_seconds
    if kind == "all_reduce":
        return 2 * hops, 2 * (n - 1) / n / axis.bytes_per_s, "ring"
    sent = n - 1 if kind == "all_gather" else (n - 1) / n
    return hops, sent / _rate(kind, axis), "pairs" if kind == "all_to_all" else "ring"


def _trees(kind: str, axis: Axis) -> Iterator[tuple[float, float, str]]:
    """The same for tree algorithms, if the axis has any."""
    if kind == "all_reduce" and axis.tree_seconds is not None:
        yield 2 * axis.tree_seconds, 2 / (_TREE_RATE * axis.bytes_per_s), "tree"
    if kind in ("all_gather", "reduce_scatter") and axis.gather_tree_seconds is not None:
        _, per_byte, _ = _ring(kind, axis)
        yield axis.gather_tree_seconds, per_byte / _GATHER_TREE_RATE, "gather tree"


def _rate(kind: str, axis: Axis) -> float:
    """Bytes per second of a kind: its own rate where the axis has one."""
    own = {
        "all_gather": axis.gather_bytes_per_s,
        "reduce_scatter": axis.scatter_bytes_per_s,
        "all_to_all": axis.all_to_all_bytes_per_s,
    }[kind]
    return own or axis.bytes_per_s


def copies_seconds(kind: str, input_bytes: float, axis: Axis, device: Device) -> float:
    """Seconds of copying one tensor into a bucket's buffer (`cost.buckets.buckets`) and out of it.

    An all-reduce leaves its results in the buffer. The copied bytes are only priced if the axis' rates exclude copies
    (it has no `gather_bytes_per_s`); otherwise only launches are.

    >>> from autopar import Cluster
    >>> h100 = Cluster.preset("h100", (8,))
    >>> round(1e3 * copies_seconds("all_gather", 32 << 20, h100.axes[0], h100.device), 3)
    0.265
    """
    n = axis.size
    if n == 1:
        return 0.0
    arrives = {"all_gather": n * input_bytes, "reduce_scatter": input_bytes / n, "all_to_all": input_bytes}.get(kind, 0)
    moved = 2 * (input_bytes + arrives) if axis.gather_bytes_per_s is None else 0.0
    launches = 1 if kind == "all_reduce" else 2
    if device.kind != "cpu":
        launches -= 1  # GPUs copy all tensors of a bucket into it by one kernel
    return device.together(0.0, moved / device.bytes_per_s, launches * device.launch_seconds)
