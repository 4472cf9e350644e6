"""What the plan runs on: one device, and the mesh axes that join devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """One accelerator (or host process).

    `flops_per_s` maps a dtype name ("bfloat16", "float32", ...) to the peak rate of matrix products;
    `efficiency` is the part of that peak a large product reaches; `launch_seconds` is the floor of one op.
    """

    name: str
    kind: str  # torch device type: "cuda" or "cpu"
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    efficiency: float = 0.7
    launch_seconds: float = 5e-6


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its size, and what one device reaches over it.

    `latency_seconds` is per hop of a ring; `bytes_per_s` what one device sends in one direction while all groups of the
    axis communicate at once.
    """

    name: str
    size: int
    latency_seconds: float
    bytes_per_s: float


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
