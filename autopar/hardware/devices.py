"""A device, a node of several devices, and the bandwidth and latency of a mesh axis given the nodes of its ranks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.hardware.figure_checks import (
    check_counts,
    check_device,
    check_flag,
    check_rates,
    check_seconds,
    check_text,
)


@dataclass(frozen=True)
class Device:
    """One accelerator (or host process).

    `flops_per_s` maps a dtype name ("bfloat16", "float32", ...) to the peak rate of matrix products. A large product
    reaches the share `efficiency` of it, and fused attention the share `attention` of that. `processors`: how many
    tiles of a product run at once. `bytes_per_s` is the rate of pointwise kernels, `launch_seconds` the least time of
    an op. `overlap`: the share of its rate at which compute runs while a collective runs; 0 if both need the same
    processors. `update_bytes_per_s`: the rate of the optimizer step, if it differs from that of pointwise ops.
    `parameter_seconds`: overhead of the runtime for each parameter and its gradient (on a GPU's host it overlaps with
    kernels).
    """

    name: str
    kind: str  # torch device type: "cuda" or "cpu"
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    efficiency: float = 0.7
    launch_seconds: float = 5e-6
    overlap: float = 0.0
    processors: int = 1
    attention: float = 0.65
    update_bytes_per_s: float | None = None
    parameter_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_text("device", "name", self.name)
        where = f"device '{self.name}'"
        check_device(where, self.kind, self.overlap, self.flops_per_s)
        check_counts(where, self, ("memory_bytes", "processors"))
        check_rates(where, self, ("bytes_per_s", "efficiency", "attention"))
        check_rates(where, self, ("update_bytes_per_s",), optional=True)
        check_seconds(where, self, ("launch_seconds", "parameter_seconds"))

    def __hash__(self) -> int:  # the mapping has no hash of its own; equality still compares it
        return hash((self.name, self.kind, self.memory_bytes, self.bytes_per_s, self.efficiency, self.launch_seconds))

    @property
    def usable_bytes(self) -> int:
        """The budget of a plan for which none is given: see `usable_bytes`."""
        return usable_bytes(self.kind, self.memory_bytes)

    def update_seconds(self, moved_bytes: float) -> float:
        """Seconds of an optimizer step that reads and writes `moved_bytes`."""
        return moved_bytes / (self.update_bytes_per_s or self.bytes_per_s)

    def together(self, products: float, moves: float, launches: float) -> float:
        """Seconds of an op from those of products, memory traffic and launches, which overlap on a GPU only."""
        return products + moves + launches if self.kind == "cpu" else max(products, moves, launches)


def usable_bytes(kind: str, memory_bytes: int) -> int:
    """Bytes of a device that a plan may use: 95 % of a GPU's memory, all of a host's.

    On a GPU the rest is for bytes that plans do not count: NCCL's buffers, and those of the allocator and cuDNN. On an
    H100 the predicted peak was too low by up to 3.5 % (docs/results/one_gpu.md).

    >>> usable_bytes("cuda", 80_000), usable_bytes("cpu", 80_000)
    (76000, 80000)
    """
    return memory_bytes - memory_bytes // 20 if kind == "cuda" else memory_bytes


_OWN_RATES = ("all_to_all_bytes_per_s", "gather_bytes_per_s", "scatter_bytes_per_s")


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size, and the rates and latencies of collectives along it.

    `latency_seconds`: of one hop of a ring. `bytes_per_s`: what one device sends in one direction round a ring while
    all groups of the axis communicate at once. `launch_seconds`: the cost of any collective before its first hop.
    `all_to_all_bytes_per_s`: what one device sends in an all-to-all. It is less than round a ring if a group has
    several devices in a node, since all of them then use the network. None: `bytes_per_s`. `gather_bytes_per_s`,
    `scatter_bytes_per_s`: measured rates of all-gather and reduce-scatter, including the copies that split and join
    tensors. None: `bytes_per_s`, without copies. `tree_seconds`: the latency up a tree over a group's nodes (an
    all-reduce goes up and down). `gather_tree_seconds`: the latency of tree all-gathers and reduce-scatters, for groups
    with one device in each node. None: only rings. `low_latency`: whether small messages may use a protocol with faster
    hops and a lower rate (`cost.collectives`). A rate may be infinite. Raises InputError for impossible figures.
    """

    name: str
    size: int
    latency_seconds: float
    bytes_per_s: float
    launch_seconds: float = 0.0
    all_to_all_bytes_per_s: float | None = None
    gather_bytes_per_s: float | None = None
    scatter_bytes_per_s: float | None = None
    tree_seconds: float | None = None
    gather_tree_seconds: float | None = None
    low_latency: bool = False

    def __post_init__(self) -> None:
        check_text("axis", "name", self.name)
        where = f"axis '{self.name}'"
        check_counts(where, self, ("size",))
        check_rates(where, self, ("bytes_per_s",))
        check_rates(where, self, _OWN_RATES, optional=True)
        check_seconds(where, self, ("latency_seconds", "launch_seconds"))
        check_seconds(where, self, ("tree_seconds", "gather_tree_seconds"), optional=True)
        check_flag(where, "low_latency", self.low_latency)


@dataclass(frozen=True)
class Node:
    """A machine with several devices: the links between its devices, and its network to other machines.

    `network_bytes_per_s`: the bandwidth in one direction of all network cards of the node together. `low_latency`: as
    in `Axis`.
    """

    devices: int
    bytes_per_s: float
    latency_seconds: float
    network_bytes_per_s: float
    network_latency_seconds: float
    launch_seconds: float = 0.0
    low_latency: bool = False

    def __post_init__(self) -> None:
        check_counts("node", self, ("devices",))
        check_rates("node", self, ("bytes_per_s", "network_bytes_per_s"))
        check_seconds("node", self, ("latency_seconds", "network_latency_seconds", "launch_seconds"))
        check_flag("node", "low_latency", self.low_latency)

    def axes(self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None) -> tuple[Axis, ...]:
        """The axes of a mesh, with bandwidths and latencies that follow from its ranks' nodes (rank r: r // devices).

        A ring uses the network wherever two neighbours are in different nodes; all groups that cross a node's border
        share its network cards. `ranks`: those of the mesh in row-major order (default 0, 1, 2, ...).

        >>> node = Node(8, 155e9, 3e-6, 45e9, 1e-5)
        >>> [axis.bytes_per_s / 1e9 for axis in node.axes((2, 8), ("dp", "tp"))]
        [5.625, 155.0]
        >>> [axis.bytes_per_s / 1e9 for axis in node.axes((8, 2), ("dp", "tp"))]
        [22.5, 155.0]
        """
        ranks = range(math.prod(shape)) if ranks is None else ranks
        return tuple(self._axis(name, groups) for name, groups in zip(names, _groups(shape, ranks), strict=True))

    def _axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        size, ring_out = len(groups[0]), Counter[int]()
        all_to_all_out: defaultdict[int, float] = defaultdict(float)
        for group in groups:
            nodes = [rank // self.devices for rank in group]
            members = Counter(nodes)
            ring_out.update(
                node_of_rank
                for node_of_rank, node_of_next in zip(nodes, nodes[1:] + nodes[:1], strict=True)
                if node_of_rank != node_of_next
            )
            for node, count in members.items():
                # in an all-to-all, the share of a device's bytes that goes to peers in other nodes
                all_to_all_out[node] += count * (size - count) / max(size - 1, 1)
        if not ring_out:
            rate = self.bytes_per_s
            return Axis(name, size, self.latency_seconds, rate, self.launch_seconds, low_latency=self.low_latency)
        ring = min(self.bytes_per_s, self.network_bytes_per_s / max(ring_out.values()))
        each = min(self.bytes_per_s, self.network_bytes_per_s / max(all_to_all_out.values()))
        tree, gather_tree = self._trees(groups)
        return Axis(
            name,
            size,
            self._latency(groups),
            ring,
            self.launch_seconds,
            min(ring, each),
            tree_seconds=tree,
            gather_tree_seconds=gather_tree,
            low_latency=self.low_latency,
        )

    def _latency(self, groups: Sequence[Sequence[int]]) -> float:
        """Mean latency of a hop in the ring with the most hops between nodes."""
        most = 0
        for group in groups:
            nodes = [rank // self.devices for rank in group]
            most = max(most, sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)))
        size = len(groups[0])
        return (most * self.network_latency_seconds + (size - most) * self.latency_seconds) / size

    def _trees(self, groups: Sequence[Sequence[int]]) -> tuple[float, float | None]:
        """`tree_seconds` and `gather_tree_seconds` of the group that spans the most nodes.

        As in NCCL's own model (ncclTopoTuneModel in src/graph/tuning.cc): a chain within each node, then a binary tree
        over the nodes. Tree all-gathers and reduce-scatters take 2.8 microseconds for each device, and a hop for each
        level of the tree (NCCL assumes these hops to be 3.5 times faster).
        """
        spanned = [Counter(rank // self.devices for rank in group) for group in groups]
        depth = math.ceil(math.log2(max(len(nodes) for nodes in spanned))) * self.network_latency_seconds
        inside = max(max(nodes.values()) for nodes in spanned) - 1
        tree = inside * self.latency_seconds + depth
        return tree, depth + 2.8e-6 * len(groups[0]) if inside == 0 else None


def _groups(shape: Sequence[int], ranks: Sequence[int]) -> list[list[list[int]]]:
    """For each axis, the groups of ranks that differ only in their coordinate on that axis."""
    total, result = math.prod(shape), []
    stride = total
    for size in shape:
        stride //= size
        starts = [i for i in range(total) if i // stride % size == 0]
        result.append([[ranks[start + k * stride] for k in range(size)] for start in starts])
    return result
