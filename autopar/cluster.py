"""What the plan runs on: one device, and the mesh axes that join devices."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import InputError


@dataclass(frozen=True)
class Device:
    """One accelerator (or host process).

    `flops_per_s` maps a dtype name ("bfloat16", "float32", ...) to the peak rate of matrix products;
    `efficiency` is the part of that peak a large product reaches; `launch_seconds` is the floor of one op.
    `overlap` is the part of compute time behind which collectives can run: 0 where they take the same processors.
    """

    name: str
    kind: str  # torch device type: "cuda" or "cpu"
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    efficiency: float = 0.7
    launch_seconds: float = 5e-6
    overlap: float = 0.0

    def __hash__(self) -> int:  # the mapping has no hash of its own; equality still compares it
        return hash((self.name, self.kind, self.memory_bytes, self.bytes_per_s, self.efficiency, self.launch_seconds))


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size, and what one device reaches over it.

    `latency_seconds` is per hop of a ring; `bytes_per_s` what one device sends in one direction round a ring while all
    groups of the axis communicate at once. `launch_seconds` is what any collective costs before its first hop.
    `all_to_all_bytes_per_s` is what one device sends when each sends to all: less than round a ring where a group has
    several devices in a node, as every one of them then crosses the network. None: the same as `bytes_per_s`.
    """

    name: str
    size: int
    latency_seconds: float
    bytes_per_s: float
    launch_seconds: float = 0.0
    all_to_all_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Node:
    """A machine with several devices: what joins them, and what joins it to other machines.

    `network_bytes_per_s` is one direction of all network cards of the node together.
    """

    devices: int
    bytes_per_s: float
    latency_seconds: float
    network_bytes_per_s: float
    network_latency_seconds: float
    launch_seconds: float = 0.0

    def axes(self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None) -> tuple[Axis, ...]:
        """What each axis of a mesh reaches, from where its ranks lie (rank r lies in node r // devices).

        A ring sends over the network wherever two neighbours lie in different nodes; all groups that leave a node share
        its cards. `ranks` are those of the mesh in row-major order (default 0, 1, 2, ...).

        >>> node = Node(8, 155e9, 3e-6, 45e9, 1e-5)
        >>> [axis.bytes_per_s / 1e9 for axis in node.axes((2, 8), ("dp", "tp"))]
        [5.625, 155.0]
        >>> [axis.bytes_per_s / 1e9 for axis in node.axes((8, 2), ("dp", "tp"))]
        [22.5, 155.0]
        """
        ranks = range(math.prod(shape)) if ranks is None else ranks
        return tuple(self._axis(name, groups) for name, groups in zip(names, _groups(shape, ranks), strict=True))

    def _axis(self, name: str, groups: Sequence[Sequence[int]]) -> Axis:
        size, ring_out, all_to_all_out = len(groups[0]), Counter[int](), Counter[int]()
        for group in groups:
            nodes = [rank // self.devices for rank in group]
            members = Counter(nodes)
            ring_out.update(here for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True) if here != there)
            for node, count in members.items():
                # of what a device sends to its size-1 peers, the part that leaves the node
                all_to_all_out[node] += count * (size - count) / max(size - 1, 1)  # type: ignore[assignment]
        if not ring_out:
            return Axis(name, size, self.latency_seconds, self.bytes_per_s, self.launch_seconds)
        ring = min(self.bytes_per_s, self.network_bytes_per_s / max(ring_out.values()))
        each = min(self.bytes_per_s, self.network_bytes_per_s / max(all_to_all_out.values()))
        return Axis(name, size, self._latency(groups), ring, self.launch_seconds, min(ring, each))

    def _latency(self, groups: Sequence[Sequence[int]]) -> float:
        """Mean over the hops of the ring that has the most hops between nodes."""
        most = 0
        for group in groups:
            nodes = [rank // self.devices for rank in group]
            most = max(most, sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)))
        size = len(groups[0])
        return (most * self.network_latency_seconds + (size - most) * self.latency_seconds) / size


def _groups(shape: Sequence[int], ranks: Sequence[int]) -> list[list[list[int]]]:
    """Per axis, the groups of ranks that differ in their coordinate on that axis alone."""
    total, result = math.prod(shape), []
    stride = total
    for size in shape:
        stride //= size
        starts = [i for i in range(total) if i // stride % size == 0]
        result.append([[ranks[start + k * stride] for k in range(size)] for start in starts])
    return result


@dataclass(frozen=True)
class Cluster:
    """A device and the axes of the mesh, slowest-varying axis first, as in `DeviceMesh`."""

    device: Device
    axes: tuple[Axis, ...]
    source: str = field(default="", compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def preset(name: str, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> Cluster:
        """A known device on a mesh of `shape`, with consecutive ranks filling one node after another.

        >>> cluster = Cluster.preset("h100", shape=(4, 8), axis_names=("dp", "tp"))
        >>> cluster.devices, cluster.device.name, cluster.axes[0].bytes_per_s < cluster.axes[1].bytes_per_s
        (32, 'h100-80', True)
        """
        preset = PRESETS.get(_ALIASES.get(name, name)) if isinstance(name, str) else None
        if preset is None:
            known = ", ".join([*PRESETS, *_ALIASES])
            raise InputError(f"cluster preset {name!r} is unknown: use one of {known}, or a profile by Cluster.load")
        device, node = preset
        mesh_shape, names = _checked_mesh(shape, axis_names)
        return Cluster(device, node.axes(mesh_shape, names), source=f"preset {device.name}")

    @staticmethod
    def of(mesh: Any) -> Cluster:
        """The cluster behind `mesh`: a Cluster is itself, a `torch.distributed` DeviceMesh finds its preset.

        A mesh of GPUs is known by the name of this process's device; InputError asks for a profile where no preset has
        that name.
        """
        if isinstance(mesh, Cluster):
            return mesh
        if not all(hasattr(mesh, name) for name in ("device_type", "mesh", "mesh_dim_names")):
            raise InputError(f"the mesh must be a DeviceMesh or a Cluster, not {type(mesh).__name__}")
        device, node = PRESETS[_preset_of_device(mesh.device_type)]
        if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun knows how many ranks share a host
            node = Node(int(os.environ["LOCAL_WORLD_SIZE"]), *(getattr(node, f.name) for f in fields(node)[1:]))
        shape, names = _checked_mesh(tuple(mesh.mesh.shape), mesh.mesh_dim_names)
        axes = node.axes(shape, names, mesh.mesh.flatten().tolist())
        return Cluster(device, axes, source=f"preset {device.name}, by the device of the mesh")

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster that `save` wrote; InputError for a file that is missing or is none."""
        try:
            return Cluster.from_dict(json.loads(Path(path).read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(f"no cluster can be read from {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The cluster in plain values, as `save` writes them."""
        return {**asdict(self), "axes": [asdict(axis) for axis in self.axes]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """
        >>> cluster = Cluster.preset("cpu", (2, 2))
        >>> Cluster.from_dict(cluster.to_dict()) == cluster
        True
        """
        try:
            device = Device(**{**data["device"], "flops_per_s": dict(data["device"]["flops_per_s"])})
            axes = tuple(Axis(**axis) for axis in data["axes"])
            cluster = Cluster(device, axes, source=str(data.get("source", "")))
        except (TypeError, KeyError, AttributeError) as error:
            raise InputError(f"not a cluster: {error}; it needs a device and axes, as in Cluster.save") from error
        _checked_mesh(cluster.shape, cluster.axis_names)
        return cluster


def _checked_mesh(shape: Any, axis_names: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Shape and axis names as tuples; InputError where they make no mesh."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not shape or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shape):
        raise InputError(f"mesh shape {shape} must be one or more positive integers, as in (4, 8)")
    if axis_names is None:
        return shape, tuple(f"axis{i}" for i in range(len(shape)))
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if not all(isinstance(name, str) and name for name in names):
        raise InputError(f"mesh axis names {names} must be non-empty strings")
    if len(names) != len(shape):
        raise InputError(f"{len(names)} axis names {names} do not fit the mesh shape {shape}: give one name an axis")
    if len(set(names)) != len(names):
        raise InputError(f"mesh axis names {names} repeat: give each axis its own name")
    return shape, names


def _preset_of_device(kind: str) -> str:
    """The preset of this process's device."""
    if kind == "cpu":
        return "cpu"
    import torch

    name = torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind
    for pattern, preset in _BY_DEVICE_NAME.items():
        if pattern in name:
            return preset
    raise InputError(
        f"no preset knows the device {name!r}: measure it with `autopar profile` under torchrun, "
        "and give Cluster.load(path) as the mesh when planning"
    )


GIB = 1024**3
GPU_OVERLAP = 0.85
"""NCCL's kernels hold some 16 of a hundred-odd processors while they run: an estimate, not a measurement. Ranks on the
cores of one host have none to spare."""

# Peak rates are dense and without TF32, which torch leaves off. `efficiency` is what large bf16 products reach of them;
# of the memory's peak, pointwise kernels reach nine tenths.
# Inside a node: bus bandwidth of large NCCL all-reduces (nccl-tests); between nodes: 90 % of the cards' line rate.
# memory_bytes: what torch.cuda.mem_get_info calls total, less the CUDA context (about 0.5 GiB).
PRESETS: dict[str, tuple[Device, Node]] = {
    # NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB): 312 TFLOP/s bf16, 19.5 fp32, 2039 GB/s; DGX A100: NVLink 3
    # (300 GB/s one way) and 8 cards of 200 Gb/s. One-node all-reduces of 1 MB to 1 GB as Hetu-Galvatron publishes them.
    "a100-80": (
        Device(
            name="a100-80",
            kind="cuda",
            memory_bytes=int(78.5 * GIB),
            flops_per_s={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
            bytes_per_s=0.9 * 2.039e12,
            efficiency=0.75,
            overlap=GPU_OVERLAP,
        ),
        Node(8, 210e9, 4e-6, 8 * 22.5e9, 1e-5, launch_seconds=2e-5),
    ),
    # NVIDIA H100 Tensor Core GPU datasheet (SXM5): 989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s; DGX H100: NVLink 4
    # (450 GB/s one way) and 8 cards of 400 Gb/s.
    "h100-80": (
        Device(
            name="h100-80",
            kind="cuda",
            memory_bytes=int(78.5 * GIB),
            flops_per_s={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12},
            bytes_per_s=0.9 * 3.35e12,
            efficiency=0.7,
            overlap=GPU_OVERLAP,
        ),
        Node(8, 360e9, 4e-6, 8 * 45e9, 1e-5, launch_seconds=2e-5),
    ),
    # One core of a current x86 server to each process, all processes on one host, joined by gloo over the loopback.
    # A stand-in where nothing is measured: autopar.calibrate.measure_host knows better in seconds.
    "cpu": (
        Device(
            name="cpu",
            kind="cpu",
            memory_bytes=16 * GIB,
            flops_per_s={"float32": 1e11, "float64": 5e10, "bfloat16": 5e10, "float16": 1e10},
            bytes_per_s=1e10,
            efficiency=0.8,
            launch_seconds=1e-5,
        ),
        Node(1 << 30, 1e9, 1e-4, 1e9, 1e-4, launch_seconds=1e-4),
    ),
}
_ALIASES = {"a100": "a100-80", "h100": "h100-80"}
_BY_DEVICE_NAME = {"A100-SXM4-80GB": "a100-80", "H100 80GB HBM3": "h100-80"}
