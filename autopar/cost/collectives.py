"""Seconds of one collective over one mesh axis, from latency and bandwidth.

Rings on n devices, B bytes handed in by each (Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005):

==============  ========================  ===========================
kind            bytes a device sends      hops one after another
==============  ========================  ===========================
all_gather      (n - 1) B                 n - 1
reduce_scatter  (n - 1) / n B             n - 1
all_reduce      2 (n - 1) / n B           2 (n - 1)
all_to_all      (n - 1) / n B             n - 1
==============  ========================  ===========================

It follows that, for one and the same tensor, reduce_scatter <= all_reduce <= reduce_scatter + all_gather.
"""

from __future__ import annotations

from autopar.cluster import Axis, Device
from autopar.errors import InputError

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective_seconds(kind: str, input_bytes: float, axis: Axis, calls: float = 1.0) -> float:
    """Seconds from start to end of one collective, when nothing else uses the axis.

    `input_bytes` is what one device hands in: all_gather's shard, the whole (local) tensor otherwise. `calls`: into how
    many collectives it is cut; less than 1 for a part of one (`autopar.cost.buckets`).
    An axis of one device moves nothing and takes no time.

    >>> axis = Axis("tp", 8, latency_seconds=0.0, bytes_per_s=100e9)
    >>> collective_seconds("all_reduce", 800e6, axis), collective_seconds("all_gather", 100e6, axis)
    (0.014, 0.007)
    """
    n = axis.size
    if n == 1:
        return 0.0
    rounds, sent = n - 1, (n - 1) / n * input_bytes
    rate = axis.bytes_per_s
    if kind == "all_reduce":
        rounds, sent = 2 * rounds, 2 * sent
    elif kind == "all_gather":
        sent, rate = (n - 1) * input_bytes, axis.gather_bytes_per_s or rate
    elif kind == "all_to_all":
        rate = axis.all_to_all_bytes_per_s or rate
    elif kind == "reduce_scatter":
        rate = axis.scatter_bytes_per_s or rate
    else:
        raise InputError(f"collective {kind!r} is unknown: use one of {', '.join(KINDS)}")
    return calls * (axis.launch_seconds + rounds * axis.latency_seconds) + sent / rate


def copies_seconds(kind: str, input_bytes: float, axis: Axis, device: Device) -> float:
    """Seconds in which one tensor is copied into the buffer of a bucket (`autopar.cost.buckets`), and out of it.

    An all-reduce leaves its results in the buffer. Bytes are priced here where the axis' rates are without copies.

    >>> from autopar import Cluster
    >>> h100 = Cluster.preset("h100", (8,))
    >>> round(1e3 * copies_seconds("all_gather", 32 << 20, h100.axes[0], h100.device), 3)
    0.2
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
