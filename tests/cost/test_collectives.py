"""Properties of collective times on any hardware, and how closely the model fits one table of measurements."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import Axis, Cluster, Node
from autopar.cost.collectives import KINDS, collective_seconds, copies_seconds, member_seconds
from autopar.errors import InputError
from autopar.hardware.presets import PRESETS

MEASURED = Axis("x", 4, 1e-5, 2e9, 5e-4, 1.3e9, gather_bytes_per_s=1.1e9, scatter_bytes_per_s=1e9)
AXES = [axis for name in PRESETS for axis in Cluster.preset(name, (4, 2, 8)).axes] + [MEASURED]
WIDE = [axis for shape in [(64,), (64, 8), (2048, 8), (4096,)] for axis in Cluster.preset("h100", shape).axes]
SIZES = [0, 1, 1 << 10, 1 << 20, 1 << 30]


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_never_take_less_time(kind: str) -> None:
    for axis in AXES:
        seconds = [collective_seconds(kind, b, axis) for b in SIZES]
        assert seconds == sorted(seconds)
        assert seconds[-1] > seconds[0] >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_more_devices_never_take_less_time(kind: str) -> None:
    for size_bytes in SIZES:
        seconds = [collective_seconds(kind, size_bytes, Axis("x", n, 1e-6, 1e11, 1e-5)) for n in range(1, 20)]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_larger_presets_never_take_less_time(kind: str, preset: str) -> None:
    for size_bytes in SIZES:
        seconds = [collective_seconds(kind, size_bytes, Cluster.preset(preset, (1 << k,)).axes[0]) for k in range(8)]
        assert seconds == sorted(seconds)


def test_all_reduce_lies_between_its_halves() -> None:
    """At most a reduce-scatter plus an all-gather. A reduce-scatter alone may take longer than an all-reduce where only
    the all-reduce has trees, or better ones."""
    for axis, total in itertools.product([*AXES, *WIDE], SIZES):
        scatter = collective_seconds("reduce_scatter", total, axis)
        gather = collective_seconds("all_gather", total / axis.size, axis)
        whole = collective_seconds("all_reduce", total, axis)
        assert whole <= (scatter + gather) * (1 + 1e-12)
        assert scatter <= whole or axis in WIDE


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_within_a_node_is_never_slower_than_one_across(kind: str) -> None:
    """Except for small all-reduces: eight nodes form a tree, while NCCL uses a chain of eight devices within a node."""
    for preset, total in itertools.product(PRESETS, SIZES):
        across, inside = Cluster.preset(preset, (8, 8)).axes
        if kind != "all_reduce" or total >= 1 << 20:
            assert collective_seconds(kind, total, inside) <= collective_seconds(kind, total, across)


def test_latency_grows_with_the_depth_of_trees_as_in_nccl() -> None:
    """As in ncclTopoTuneModel, with the preset's latencies per hop, and an integral number of hops in gather trees."""
    node = PRESETS["h100-80"][1]
    across, inside = node.network_latency_seconds, node.latency_seconds
    shapes = [(16384,), (2048, 8)]
    flat, nodes = (replace(Cluster.preset("h100", shape).axes[0], low_latency=False) for shape in shapes)
    launch = node.launch_seconds
    assert collective_seconds("all_reduce", 0, flat) == pytest.approx(launch + 2 * (7 * inside + 11 * across))
    assert collective_seconds("all_reduce", 0, nodes) == pytest.approx(launch + 2 * 11 * across)
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_seconds(kind, 0, nodes) == pytest.approx(launch + 11 * across + 2048 * 2.8e-6)
        ring = launch + 14336 * inside + 2048 * across - across
        assert collective_seconds(kind, 0, flat) == pytest.approx(ring, rel=1e-3)  # several devices in a node: no trees


def test_small_messages_take_a_fifth_of_the_latency_of_a_ring_and_large_ones_all_its_rate() -> None:
    node, axis = PRESETS["h100-80"][1], Cluster.preset("h100", (8,)).axes[0]
    pieces = replace(axis, low_latency=False)
    for kind, hops in (("all_reduce", 14), ("all_gather", 7), ("reduce_scatter", 7)):
        assert collective_seconds(kind, 0, axis) == pytest.approx(node.launch_seconds + hops * node.latency_seconds / 5)
        assert collective_seconds(kind, 1 << 26, axis) == collective_seconds(kind, 1 << 26, pieces)


def test_a_few_nodes_send_in_rings() -> None:
    for size in (2, 4):
        axis = Cluster.preset("h100", (size, 8)).axes[0]
        ring = replace(axis, tree_seconds=None, gather_tree_seconds=None)
        for kind, total in itertools.product(KINDS, [*SIZES, 1 << 22]):
            if total > 1 << 20 or kind != "all_reduce":
                assert collective_seconds(kind, total, axis) == collective_seconds(kind, total, ring)


def test_members_of_a_bucket_cost_together_what_its_collective_does() -> None:
    for kind, axis, total in itertools.product(KINDS, [*AXES, *WIDE], SIZES):
        together = sum(member_seconds(kind, part * total, part, axis) for part in (0.5, 0.375, 0.125, 0.0))
        assert together == pytest.approx(collective_seconds(kind, total, axis), rel=1e-12)


def test_two_of_a_half_never_take_less_than_one_whole() -> None:
    for kind, axis, total in itertools.product(KINDS, AXES, SIZES):
        assert 2 * collective_seconds(kind, total / 2, axis) >= collective_seconds(kind, total, axis) * (1 - 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_bucket_move_what_goes_in_and_what_comes_out(kind: str) -> None:
    """If rates were measured with copies included, only launches remain; one device needs no copies."""
    cluster = Cluster.preset("h100", (8,))
    axis, device, handed = cluster.axes[0], cluster.device, 1 << 26
    out = {"all_gather": 8 * handed, "reduce_scatter": handed / 8, "all_to_all": handed, "all_reduce": 0}[kind]
    assert copies_seconds(kind, handed, axis, device) == pytest.approx(2 * (handed + out) / device.bytes_per_s)
    # one kernel copies a whole bucket in, so each tensor only pays for its copy out, which an all-reduce does not need
    into_at_once = device.launch_seconds * (kind != "all_reduce")
    assert copies_seconds(kind, handed, MEASURED, device) == into_at_once
    cpu = replace(device, kind="cpu")
    assert copies_seconds(kind, handed, MEASURED, cpu) == into_at_once + device.launch_seconds
    assert copies_seconds(kind, handed, Axis("x", 1, 1.0, 1.0), device) == 0


def test_one_device_moves_nothing() -> None:
    assert all(collective_seconds(kind, 1 << 30, Axis("x", 1, 1.0, 1.0, 1.0)) == 0 for kind in KINDS)


def test_unknown_kind_is_an_error() -> None:
    with pytest.raises(InputError, match="all_reduce"):
        collective_seconds("broadcast", 8, AXES[0])


def published(prefix: str) -> list[dict[str, str]]:
    """Rows of the table of published measurements, which is stored beside the tests."""
    with open(Path(__file__).parent / "measured_collectives.csv") as file:
        return [row for row in csv.DictReader(file) if row["id"].startswith(prefix)]


def test_large_all_reduces_and_all_to_alls_of_one_a100_node_as_measured() -> None:
    for row in published("galv-ar-") + published("galv-a2a-"):
        if "MB" not in row["id"] or int(row["id"].split("-")[-1][:-2]) < 256:
            continue
        axis = Cluster.preset("a100", (int(row["gpus"]),)).axes[0]
        kind = "all_reduce" if "-ar-" in row["id"] else "all_to_all"
        seconds = collective_seconds(kind, int(row["id"].split("-")[-1][:-2]) * 2**20, axis)
        assert seconds == pytest.approx(float(row["value"]) * 1e-3, rel=0.3), row["id"]


def test_small_all_reduces_of_one_a100_node_as_measured() -> None:
    for size in (4, 8):
        measured = next(float(row["value"]) for row in published(f"galv-ar-{size}-1MB")) * 1e-3
        axis = Cluster.preset("a100", (size,)).axes[0]
        assert collective_seconds("all_reduce", 1 << 20, axis) == pytest.approx(measured, rel=0.15)


def test_groups_across_two_nodes_share_the_network_as_measured() -> None:
    """Two nodes of eight: consecutive groups of 8 reach 154 GB/s, strided ones 20.8; all sixteen reach 44.7."""
    inside = float(published("galv-ar-1n-8")[0]["value"]) * 1e9
    whole = float(published("galv-ar-2n-16")[0]["value"]) * 1e9
    node = Node(8, inside, 0.0, whole, 0.0)
    assert node.axes((2, 8), "ab")[1].bytes_per_s == inside
    for row in published("galv-ar-2n-"):
        size = int(row["gpus"])
        strided = node.axes((size, 16 // size), "ab")[0]
        assert strided.bytes_per_s <= float(row["value"]) * 1e9 * 1.1
        if size >= 8:
            assert strided.bytes_per_s == pytest.approx(float(row["value"]) * 1e9, rel=0.1)
