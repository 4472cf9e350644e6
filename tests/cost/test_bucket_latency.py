"""A bucket costs its latency once, in however many ways the parameters of a block are communicated."""

import pytest
import torch
from torch import nn

from autopar import Cluster, Plan, plan
from autopar.cost.buckets.latency import moves_of, way_number
from autopar.cost.collectives import collective_seconds, copies_seconds, least_latency
from autopar.plans import Collective
from autopar.resharding.path_edges import KINDS
from autopar.resharding.reshard import Move

CLUSTER = Cluster.preset("h100", (16, 8))
DATA = ["activation:* = S0, S0", "recompute:* = never"]


def made_with(*pins: str, width: int = 512, blocks: int = 6, micro_batches: int = 1) -> Plan:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))

    with torch.device("meta"):
        model, batch = nn.Sequential(*(block() for _ in range(blocks))), torch.empty(8192, width)
    given = {"constraints": [*DATA, *pins], "precision": "bf16", "micro_batches": micro_batches}
    return plan(model, {"input": batch}, CLUSTER, loss_fn=torch.sum, **given)


def of_buckets(made: Plan) -> list[Collective]:
    return [one for one in made.collectives if one.cause.startswith("bucket")]


def alone(one: Collective, members: int) -> float:
    """Seconds of a bucket by itself, including the copies of its members, which are of equal size."""
    axis = CLUSTER.axes[one.axis]
    copies = members * copies_seconds(one.kind, one.bytes / members, axis, CLUSTER.device)
    return one.count * (collective_seconds(one.kind, one.bytes, axis) + copies)


@pytest.mark.parametrize("width", [4096, 5120])
@pytest.mark.parametrize("storage", ["S0, S0", "S0, R", "R, S0", "R, R"])
def test_a_blocks_parameters_that_move_alike_pay_for_one_bucket(storage: str, width: int) -> None:
    """A block of 64 MiB, which fills a bucket, or of 100 MiB, too little for two. It is the model's only block, as
    several would share a bucket."""
    made = made_with(f"param:* = {storage}", width=width, blocks=1)
    assert made.buckets and {len(bucket.names) for bucket in made.buckets} == {2}
    for one in of_buckets(made):
        assert one.seconds == pytest.approx(alone(one, 2), rel=1e-9)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_moves_in_two_ways_pays_two_latencies(micro_batches: int) -> None:
    """Half of a block is gathered over one axis and half over the other: each bucket pays its own latency."""
    pins = "param:*.0.weight = S0, R", "param:*.2.weight = R, S0"
    made = made_with(*pins, blocks=1, micro_batches=micro_batches)
    assert len(made.buckets) == 2
    phases = {(one.kind, one.phase) for one in of_buckets(made)}
    assert {("all_gather", "forward"), ("reduce_scatter", "backward"), ("all_reduce", "backward")} <= phases
    for one in of_buckets(made):
        least = one.count * least_latency(one.kind, CLUSTER.axes[one.axis])
        assert least <= one.seconds <= alone(one, 1) * (1 + 1e-9)


def test_blocks_that_share_buckets_pay_for_those_that_run() -> None:
    """Six blocks of 1 MiB in one bucket, or in one bucket for each way of communicating."""
    alike = made_with("param:* = S0, S0")
    apart = made_with("param:*.0.weight = S0, R", "param:*.2.weight = R, S0")
    assert (len(alike.buckets), len(apart.buckets)) == (1, 2)
    for made, members in ((alike, 12), (apart, 6)):
        for one in of_buckets(made):
            least = one.count * least_latency(one.kind, CLUSTER.axes[one.axis])
            assert least <= one.seconds <= alone(one, members) * (1 + 1e-9)


def test_a_parameter_larger_than_a_bucket_is_one_collective() -> None:
    made = made_with("param:* = S0, S0", width=16384, blocks=1)
    assert {len(bucket.names) for bucket in made.buckets} == {1}
    for one in of_buckets(made):
        assert one.seconds == pytest.approx(alone(one, 1), rel=1e-9)


def test_a_bias_goes_with_a_weight_larger_than_a_bucket() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16384, 16384), nn.ReLU())
        batch = torch.empty(8192, 16384)
    made = plan(model, {"input": batch}, CLUSTER, loss_fn=torch.sum, constraints="fsdp", precision="bf16")
    assert [bucket.names for bucket in made.buckets] == [("0.weight", "0.bias")]


def test_buckets_of_a_block_are_about_as_large_as_its_largest_parameter() -> None:
    """Parameters of 18, 18 and 72 MiB: a bucket of 72 would not hide behind the compute that reads one of 36."""

    def block() -> nn.Module:
        linear = [nn.Linear(3072, width, bias=False) for width in (3072, 3072, 12288)]
        return nn.Sequential(*(nn.Sequential(one, nn.ReLU()) for one in linear), nn.AvgPool1d(4))

    with torch.device("meta"):
        model, batch = nn.Sequential(*(block() for _ in range(4))), torch.empty(8192, 3072)
    made = plan(model, {"input": batch}, CLUSTER, loss_fn=torch.sum, constraints="fsdp", precision="bf16")
    sizes = {name: p.numel() * 2 for name, p in model.named_parameters()}
    assert {sum(sizes[name] for name in bucket.names) >> 20 for bucket in made.buckets} == {108}


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_ways_are_numbered(axes: int) -> None:
    """Every combination of two collectives has its own number, from which it can be decoded."""
    mesh = (2,) * axes
    each = [Move(kind, axis, 8) for kind in KINDS for axis in range(axes)]
    ways = [[], *([one] for one in each), *([one, other] for one in each for other in each)]
    numbers = [way_number(way, mesh) for way in ways]
    assert len(set(numbers)) == len(ways) and numbers[0] == 0
    assert [moves_of(number, axes) for number in numbers] == [[(m.kind, m.axis) for m in way] for way in ways]


def test_axes_of_one_device_are_no_way() -> None:
    assert way_number([Move("all_gather", 0, 8), Move("all_reduce", 1, 8)], (1, 2)) == way_number(
        [Move("all_reduce", 1, 8)], (1, 2)
    )
