"""Clusters: presets, the placement of a mesh's ranks, JSON, and the errors for invalid meshes."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.cluster import Axis, Cluster, Device, Node
from autopar.errors import InputError
from autopar.hardware.presets import PRESETS


@pytest.mark.parametrize("name", [*PRESETS, "a100", "h100"])
def test_presets_survive_json(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name, (2, 4), ("dp", "tp"))
    cluster.save(tmp_path / "cluster.json")
    loaded = Cluster.load(tmp_path / "cluster.json")
    assert loaded == cluster
    assert hash(loaded) == hash(cluster)
    assert loaded.source == cluster.source
    assert json.loads((tmp_path / "cluster.json").read_text()) == cluster.to_dict()


def test_permuting_mesh_axes_permutes_names_only_while_strides_agree() -> None:
    one, other = Cluster.preset("a100", (4, 8), ("dp", "tp")), Cluster.preset("a100", (4, 8), ("tp", "dp"))
    strip = lambda axes: [(a.size, a.bytes_per_s, a.latency_seconds) for a in axes]  # noqa: E731
    assert strip(one.axes) == strip(other.axes)


@pytest.mark.parametrize("preset", ["a100", "h100"])
def test_strided_groups_across_nodes_are_slower_than_consecutive_ones(preset: str) -> None:
    across, inside = Cluster.preset(preset, (8, 8)).axes
    assert across.bytes_per_s * 4 < inside.bytes_per_s
    assert across.latency_seconds > inside.latency_seconds


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "cpu"])
def test_every_gpu_is_a_whole_description(name: str) -> None:
    device, node = PRESETS[name]
    assert device.name == name
    assert device.flops_per_s["float16"] > device.flops_per_s["float32"] >= device.flops_per_s["float64"] > 1e12
    assert 0 < device.efficiency <= 1 and 0 < device.attention <= 1 and 0.7 < device.overlap < 1
    assert device.memory_bytes < 200 * 2**30 and device.processors >= 80
    across, inside = node.axes((8, 8), ("dp", "tp"))
    assert across.bytes_per_s < inside.bytes_per_s < device.bytes_per_s


@pytest.mark.parametrize(
    ("said", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 PCIe", "h100-80-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
    ],
)
def test_a_gpu_is_known_by_what_torch_calls_it(said: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: said)
    assert Cluster.of(mesh_of("cuda", torch.arange(8))) == Cluster.preset(preset, (8,))


def test_other_cards_and_nodes() -> None:
    assert Cluster.preset("a100", (16,), between_nodes="8xhdr") == Cluster.preset("a100", (16,))
    slow = Cluster.preset("a100", (16,), between_nodes="4xroce100").axes[0]
    assert slow.bytes_per_s == pytest.approx(0.9 * 50e9)
    across, inside = Cluster.preset("a100", (2, 4), devices_per_node=4).axes
    assert across.bytes_per_s < inside.bytes_per_s
    for text in ("8xtoken", "0xhdr", "hdr8", ""):
        with pytest.raises(InputError, match="8xhdr"):
            Cluster.preset("a100", (16,), between_nodes=text)


def test_groups_that_share_the_network_share_its_bandwidth() -> None:
    node = Node(8, 1e12, 1e-6, 8e9, 1e-5)
    rates = [node.axes((4, stride), "ab")[0].bytes_per_s for stride in (2, 4, 8, 16)]
    assert rates == [1e12 if 4 * s <= 8 else 8e9 / min(s, 8) for s in (2, 4, 8, 16)]


def test_all_to_all_over_nodes_pays_for_every_member_of_a_node() -> None:
    (axis,) = Node(8, 1e12, 1e-6, 8e9, 1e-5).axes((64,), ("x",))
    assert axis.bytes_per_s == 8e9
    # each of the 8 devices sends 56 of its 63 pieces over the node's network link of 8e9 bytes/s
    assert axis.all_to_all_bytes_per_s == pytest.approx(1e9 * 63 / 56)


def mesh_of(device_type: str, ranks: torch.Tensor, names: Any = None) -> Any:
    """The attributes of a DeviceMesh that `Cluster.of` reads; a real one needs a process group."""
    return SimpleNamespace(device_type=device_type, mesh=ranks, mesh_dim_names=names)


def test_of_a_mesh_looks_at_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    ranks = torch.arange(16).view(2, 8)
    cluster = Cluster.of(mesh_of("cuda", ranks, ("dp", "tp")))
    assert cluster == Cluster.preset("a100", (2, 8), ("dp", "tp"))
    turned = Cluster.of(mesh_of("cuda", ranks.t(), ("tp", "dp")))
    assert turned.axes == tuple(reversed(cluster.axes))


def test_of_a_mesh_believes_torchrun_on_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    across, inside = Cluster.of(mesh_of("cuda", torch.arange(8).view(2, 4))).axes
    assert across.bytes_per_s < inside.bytes_per_s


@pytest.mark.parametrize("text", ["four", "", "0", "-1", "1.5"])
def test_of_a_mesh_names_a_variable_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(InputError, match=rf"LOCAL_WORLD_SIZE is '{text}': .* torchrun.*unset it"):
        Cluster.of(mesh_of("cpu", torch.arange(4)))


def test_of_a_host_or_a_cluster() -> None:
    cluster = Cluster.of(mesh_of("cpu", torch.arange(4)))
    assert cluster == Cluster.preset("cpu", (4,))
    assert Cluster.of(cluster) is cluster


def test_of_an_unknown_gpu_asks_for_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA GeForce RTX 4090")
    with pytest.raises(InputError, match=r"RTX 4090.*autopar profile"):
        Cluster.of(mesh_of("cuda", torch.arange(4)))


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((0, 2), None, "positive integers"),
        ((), None, "positive integers"),
        ((2.0,), None, "positive integers"),
        ("4x8", None, "positive integers"),
        ((10**9, 8), None, "has 8,000,000,000 devices: plans are for up to 1,048,576"),
        ((2, 1, 2, 3, 2, 2), None, r"more than 4 axes of several devices.* join some, as in \(2, 1, 2, 12\)"),
        ((2, 2), ("dp",), "1 axis names"),
        ((2, 2), ("dp", "dp"), "repeat"),
        ((2, 2), ("dp", 3), "strings"),
    ],
)
def test_bad_meshes_are_clear_errors(shape: Any, names: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Cluster.preset("cpu", shape, names)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"a100-80, .*h200, .*cpu"):
        Cluster.preset("tpu", (8,))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"device": 3}', '{"device": {"name": "x"}, "axes": []}'])
def test_a_damaged_file_is_a_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(InputError, match="cluster"):
        Cluster.load(tmp_path / "cluster.json")


def test_neither_mesh_nor_cluster() -> None:
    with pytest.raises(InputError, match="DeviceMesh or a Cluster"):
        Cluster.of((4, 8))


WHOLE = Cluster.preset("h100", (2, 4), ("dp", "tp"))
MORE = "must be a number, 1 or more"
WRONG: list[tuple[str, str, Any, str]] = [
    *[("axis", "bytes_per_s", value, MORE) for value in (-1.0, 0, 1e-300, math.nan, "fast", None, True)],
    ("axis", "all_to_all_bytes_per_s", 0.0, f"{MORE}, or None"),
    ("axis", "gather_bytes_per_s", -1.0, f"{MORE}, or None"),
    ("axis", "scatter_bytes_per_s", "1", f"{MORE}, or None"),
    *[("axis", "latency_seconds", value, "of seconds, 0 or more") for value in (-1.0, math.inf, math.nan, "0")],
    ("axis", "launch_seconds", -1e-9, "a number of seconds, 0 or more"),
    ("axis", "tree_seconds", -1e-9, "a number of seconds, 0 or more, or None"),
    ("axis", "gather_tree_seconds", [], "a number of seconds, 0 or more, or None"),
    *[("axis", "size", value, "a whole number, 1 or more") for value in (0, -2, 2.5, "2", True)],
    ("axis", "low_latency", "yes", "must be True or False"),
    *[("device", "memory_bytes", value, "a whole number, 1 or more") for value in (0, -5, "80GiB", math.inf)],
    ("device", "processors", 0, "a whole number, 1 or more"),
    *[("device", name, 0.0, MORE) for name in ("bytes_per_s", "update_bytes_per_s")],
    *[("device", name, 0.0, "must be a number of more than 0") for name in ("efficiency", "attention")],
    *[("device", name, -1.0, "0 or more") for name in ("launch_seconds", "parameter_seconds")],
    *[("device", "overlap", value, "must be a number from 0 to 1") for value in (-0.1, 2.0, math.nan)],
    ("device", "kind", "tpu", "must be one of cuda, cpu"),
    ("device", "flops_per_s", {}, "with one of float32"),
    ("device", "flops_per_s", {"bfloat16": 1e15}, "with one of float32"),
    ("device", "flops_per_s", "fast", "with one of float32"),
]


@pytest.mark.parametrize(("part", "name", "value", "message"), WRONG)
def test_a_figure_that_none_can_have_is_named(part: str, name: str, value: Any, message: str, tmp_path: Path) -> None:
    where = "axis 'tp'" if part == "axis" else "device 'h100-80'"
    pattern = rf"{where}: {name} is .*, and .*{message}"
    with pytest.raises(InputError, match=pattern):
        replace(WHOLE.axes[1] if part == "axis" else WHOLE.device, **{name: value})
    data = WHOLE.to_dict()
    (data["axes"][1] if part == "axis" else data["device"])[name] = value
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=rf"no cluster can be read from .*profile\.json: {pattern}"):
        Cluster.load(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: replace(WHOLE, axes=()), "axes of a cluster are"),
        (lambda: replace(WHOLE, axes=[1, 2]), "axes of a cluster are"),
        (lambda: replace(WHOLE, axes=WHOLE.axes[:1] * 2), "repeat"),
        (lambda: replace(WHOLE, device=None), "must be a Device"),
        (lambda: replace(WHOLE, spreads="x"), "spreads is 'x', and must be numbers by"),
        (lambda: replace(WHOLE, spreads={"launch": "x"}), "spread of launch is 'x'"),
        (lambda: replace(WHOLE.axes[0], name=3), "axis: name is 3, and must be text"),
        (lambda: replace(WHOLE.device, flops_per_s={"float32": 0.0}), "flops_per_s of float32 is 0"),
        (lambda: Node(0, 1e9, 0.0, 1e9, 0.0), "node: devices is 0"),
        (lambda: Node(8, 1e9, 0.0, -1e9, 0.0), "node: network_bytes_per_s is -1"),
        (lambda: Cluster.from_dict([1]), "it has no device"),  # type: ignore[arg-type]
        (lambda: Cluster.from_dict({**WHOLE.to_dict(), "axes": "dp"}), "it has no list of axes"),
        (lambda: Cluster.from_dict({**WHOLE.to_dict(), "device": {"name": "x"}}), "missing .* 'kind'"),
    ],
)
def test_parts_of_no_cluster_are_clear_errors(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()


def test_a_count_may_be_written_as_any_whole_number() -> None:
    data = WHOLE.to_dict()
    data["device"]["memory_bytes"] = 8e10
    read = Cluster.from_dict(data).device.memory_bytes
    assert read == 80_000_000_000 and isinstance(read, int)


def test_what_costs_nothing_is_a_figure_too(tmp_path: Path) -> None:
    free = Cluster(
        Device("free", "cpu", 1, {"float32": math.inf}, math.inf, launch_seconds=0.0, overlap=1.0),
        (Axis("x", 2, 0.0, math.inf), Axis("y", 2, 1e-12, 1e15, tree_seconds=0.0)),
    )
    free.save(tmp_path / "free.json")
    assert Cluster.load(tmp_path / "free.json") == free
