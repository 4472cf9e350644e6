"""What the plan runs on: one device, and the mesh axes that join devices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.arguments.checks import count_of
from autopar.arguments.environment import number_in
from autopar.arguments.text_files import path_of, write_text
from autopar.errors import InputError
from autopar.hardware.devices import Axis, Device, Node
from autopar.hardware.figure_checks import check_spreads
from autopar.hardware.presets import ALIASES, PRESETS, network, preset_of_device_name

__all__ = ["Axis", "Cluster", "Device", "Node"]


@dataclass(frozen=True)
class Cluster:
    """A device and the axes of the mesh, slowest-varying axis first, as in `DeviceMesh`.

    `spreads`: for measured figures, how much their repeats varied, as a share of each.
    """

    device: Device
    axes: tuple[Axis, ...]
    source: str = field(default="", compare=False)
    spreads: Mapping[str, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise InputError(f"the device of a cluster is of {type(self.device).__name__}: it must be a Device")
        axes = self.axes
        if not isinstance(axes, (tuple, list)) or not axes or not all(isinstance(axis, Axis) for axis in axes):
            raise InputError(f"the axes of a cluster are {axes!r:.60}: they must be a tuple of one Axis or more")
        _checked_mesh(self.shape, self.axis_names)
        check_spreads("cluster", self.spreads)

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
    def preset(
        name: str,
        shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
        *,
        between_nodes: str | None = None,
        devices_per_node: int | None = None,
    ) -> Cluster:
        """A known device on a mesh of `shape`, with consecutive ranks filling one node after another.

        `between_nodes`: the network cards of one node, if they are not the preset's: "8xndr", "4xroce100", "ethernet25"
        (`autopar.hardware.presets.NETWORKS`).

        >>> cluster = Cluster.preset("h100", shape=(4, 8), axis_names=("dp", "tp"))
        >>> cluster.devices, cluster.device.name, cluster.axes[0].bytes_per_s < cluster.axes[1].bytes_per_s
        (32, 'h100-80', True)
        """
        preset = PRESETS.get(ALIASES.get(name, name)) if isinstance(name, str) else None
        if preset is None:
            names_of_presets = ", ".join([*PRESETS, *ALIASES])
            description = repr(name) if isinstance(name, str) else f"of {type(name).__name__}"
            raise InputError(
                f"cluster preset {description} is unknown: use one of {names_of_presets}; Cluster.load reads a profile"
            )
        device, node = preset
        if between_nodes is not None:
            rate, latency = network(between_nodes)
            node = replace(node, network_bytes_per_s=rate, network_latency_seconds=latency)
        if devices_per_node is not None:
            node = replace(node, devices=count_of("devices_per_node", devices_per_node))
        mesh_shape, names = _checked_mesh(shape, axis_names)
        return Cluster(device, node.axes(mesh_shape, names), source=f"preset {device.name}")

    @staticmethod
    def of(mesh: Any) -> Cluster:
        """The cluster of a mesh: a `Cluster` itself; for a `torch.distributed` DeviceMesh, a preset.

        For GPUs the preset is found by the name of this process's device. Raises InputError, which asks for a profile,
        if no preset has that name.
        """
        if isinstance(mesh, Cluster):
            return mesh
        if not all(hasattr(mesh, name) for name in ("device_type", "mesh", "mesh_dim_names")):
            raise InputError(
                f"the mesh must be a DeviceMesh or a Cluster, such as Cluster.preset('h100', (2, 4)), not "
                f"{type(mesh).__name__}"
            )
        device, node = PRESETS[_preset_of_device(mesh.device_type)]
        # torchrun says how many ranks share a host
        node = replace(node, devices=number_in("LOCAL_WORLD_SIZE", node.devices))
        shape, names = _checked_mesh(tuple(mesh.mesh.shape), mesh.mesh_dim_names)
        axes = node.axes(shape, names, mesh.mesh.flatten().tolist())
        return Cluster(device, axes, source=f"preset {device.name}, by the device of the mesh")

    def save(self, path: str | Path) -> None:
        """Write the cluster as JSON; raises InputError if the file cannot be written."""
        write_text("the cluster", path, json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster that `save` wrote; InputError names the file if it is missing or no cluster."""
        file = path_of("a cluster", path)
        try:
            return Cluster.from_dict(json.loads(file.read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, InputError) as error:
            raise InputError(f"no cluster can be read from {path}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The cluster in plain values, as `save` writes them."""
        return {**asdict(self), "axes": [asdict(axis) for axis in self.axes]}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Cluster:
        """The cluster that `to_dict` gave; raises InputError for other data, and for impossible figures.

        >>> cluster = Cluster.preset("cpu", (2, 2))
        >>> Cluster.from_dict(cluster.to_dict()) == cluster
        True
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("device"), Mapping):
            raise InputError("not a cluster: it has no device; it needs a device and axes, as in Cluster.save")
        if not isinstance(data.get("axes"), list) or not all(isinstance(axis, Mapping) for axis in data["axes"]):
            raise InputError("not a cluster: it has no list of axes; it needs a device and axes, as in Cluster.save")
        try:
            device, axes = Device(**_in_whole(data["device"])), tuple(Axis(**_in_whole(axis)) for axis in data["axes"])
        except TypeError as error:  # a field is missing, or unknown
            raise InputError(f"not a cluster: {error}; it needs a device and axes, as in Cluster.save") from error
        return Cluster(device, axes, source=str(data.get("source", "")), spreads=data.get("spreads", {}))


def _in_whole(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Convert counts that JSON reads as floats to int: somebody may write 8e10 for a number of bytes."""
    counts = ("memory_bytes", "processors", "size")
    return {
        name: int(value) if name in counts and isinstance(value, float) and value.is_integer() else value
        for name, value in figures.items()
    }


_MOST_DEVICES = 1 << 20  # of a mesh: finding the nodes of a preset's ranks takes 1 s per million ranks and axis
_MOST_AXES = 4  # of more than one device: the number of strategies of an op multiplies with each of them


def _checked_mesh(shape: Any, axis_names: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Mesh shape and axis names as tuples; InputError if they are not those of a mesh."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if not shape or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in shape):
        raise InputError(f"mesh shape {shape} must be one or more positive integers, as in (4, 8)")
    if math.prod(shape) > _MOST_DEVICES:
        raise InputError(f"a mesh of {shape} has {math.prod(shape):,} devices: plans are for up to {_MOST_DEVICES:,}")
    if sum(n > 1 for n in shape) > _MOST_AXES:
        joined = (*shape[: _MOST_AXES - 1], math.prod(shape[_MOST_AXES - 1 :]))
        raise InputError(
            f"a mesh of {shape} has more than {_MOST_AXES} axes of several devices, and ways to split an op multiply "
            f"with every one: join some, as in {joined}"
        )
    if axis_names is None:
        return shape, tuple(f"axis{i}" for i in range(len(shape)))
    names = tuple(axis_names) if isinstance(axis_names, (tuple, list)) else (axis_names,)
    if not all(isinstance(name, str) and name for name in names):
        raise InputError(f"mesh axis names {names} must be non-empty strings")
    if len(names) != len(shape):
        raise InputError(f"{len(names)} axis names {names} do not fit the mesh shape {shape}: give one name an axis")
    if len(set(names)) != len(names):
        raise InputError(f"mesh axis names {names} repeat: give each axis its own name")
    return shape, names


def _preset_of_device(kind: str) -> str:
    """The name of the preset for this process's device."""
    if kind == "cpu":
        return "cpu"
    import torch

    name = torch.cuda.get_device_name() if kind == "cuda" and torch.cuda.is_available() else kind
    preset = preset_of_device_name(name)
    if preset is None:
        raise InputError(
            f"there is no preset for the device {name!r}: measure it with `autopar profile` under torchrun, "
            "and give Cluster.load(path) as the mesh when planning"
        )
    return preset
