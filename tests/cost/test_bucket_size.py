"""The bucket size grows with the latency of the axes that a bucket can be communicated over; plans use that size."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import Cluster, Plan, plan
from autopar.cost.buckets.size import BUCKET_BYTES, bucket_bytes
from autopar.cost.collectives import collective_seconds

FLAT = [(64,), (128,), (256,), (512,)]


def test_latency_is_a_third_at_most_of_a_full_bucket_that_memory_has_room_for() -> None:
    for shape in FLAT:
        cluster = Cluster.preset("h100", shape)
        axis, size = cluster.axes[0], bucket_bytes(cluster)
        latency = collective_seconds("all_gather", 0, axis) / collective_seconds("all_gather", size / axis.size, axis)
        assert size > BUCKET_BYTES
        assert latency <= 1 / 3 + 1e-6 or size == cluster.device.memory_bytes // 128


def test_buckets_stay_small_where_one_axis_is_quick() -> None:
    assert {bucket_bytes(Cluster.preset("h100", shape)) for shape in [(1,), (8,), (2048, 8)]} == {BUCKET_BYTES}


@pytest.mark.parametrize(("latency", "size"), [(0.0, BUCKET_BYTES), (1e-6, None)])
def test_over_links_of_infinite_rate_hops_alone_count(latency: float, size: int | None) -> None:
    cluster = Cluster.preset("h100", (8,))
    (axis,) = cluster.axes
    free = replace(axis, bytes_per_s=math.inf, latency_seconds=latency, launch_seconds=latency)
    cluster = replace(cluster, axes=(free,))
    assert bucket_bytes(cluster) == (size or cluster.device.memory_bytes // 128)


def test_links_of_infinite_rate_are_the_limit_of_quick_ones() -> None:
    cluster = Cluster.preset("h100", (4,))
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.empty(64, 64)

    def made(rate: float) -> Plan:
        axis = replace(cluster.axes[0], bytes_per_s=rate)
        return plan(model, {"input": batch}, replace(cluster, axes=(axis,)), constraints="fsdp", loss_fn=torch.sum)

    quick, infinite = made(1e18), made(math.inf)
    assert infinite.collectives and infinite.certificate.status == "optimal"
    assert infinite.predicted.step_seconds == pytest.approx(quick.predicted.step_seconds, rel=1e-6)
    assert Plan.from_json(infinite.to_json()) == infinite


def _of_many_layers(shape: tuple[int, ...]) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU()) for _ in range(32)))
        batch = torch.empty(8192, 2048)
    return plan(model, {"input": batch}, Cluster.preset("h100", shape), constraints=("fsdp", "recompute:* = never"))


def test_one_collective_moves_more_layers_over_many_nodes() -> None:
    """32 layers of 8 MiB (bfloat16): 25 MiB hold at most 3 of them, 25/64 of 628 MiB hold 30."""
    assert [len(_of_many_layers(shape).buckets) for shape in [(8,), (512,)]] == [11, 2]


def test_what_a_bucket_could_hold_is_no_matter_to_one_of_a_small_block() -> None:
    """More device memory under the same budget raises the bucket size; buckets of these small blocks do not change."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(7168, 7168), nn.ReLU()) for _ in range(6)))
        batch = torch.empty(8192, 7168)
    cluster, made = Cluster.preset("h100", (512,)), []
    for gib in (24, 28):
        more = replace(cluster, device=replace(cluster.device, memory_bytes=gib << 30))
        made.append(plan(model, {"input": batch}, more, constraints="fsdp", precision="bf16", memory_budget="16GiB"))
    assert [one.names for one in made[0].buckets] == [one.names for one in made[1].buckets]
    assert made[0].predicted.step_seconds == pytest.approx(made[1].predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize(("bias", "blocks"), [("R", 6), ("S0", 1)])
def test_tiny_buckets_that_are_only_reduced_are_one_over_blocks(bias: str, blocks: int) -> None:
    """Biases stored whole form one tiny bucket over blocks whose weights fill buckets of their own; sharded biases are
    gathered with the weights."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(6)))
        batch = torch.empty(8192, 4096)
    pins = ["activation:* = S0", "param:*.weight = S1", f"param:*.bias = {bias}", "recompute:* = never"]
    made = plan(model, {"input": batch}, Cluster.preset("h100", (8,)), constraints=pins, precision="bf16")
    over = [len({name.partition(".")[0] for name in one.names}) for one in made.buckets if "0.0.bias" in one.names]
    assert over == [blocks]
    tiny = [c.bytes for c in made.collectives if c.kind == "all_reduce" and c.bytes > 4]
    assert tiny == ([6 * 4096 * 2] if blocks > 1 else [])
