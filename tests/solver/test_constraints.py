"""User constraints on a plan: layouts pinned, forbidden and preferred, roles of mesh axes, options of presets."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from toys import Stack, cluster, on_meta, planned, stack, toy

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, InputError
from autopar.layout import Layout
from autopar.plans import NodePlan, Plan
from autopar.solver.constraints.constraints import PreferenceWarning


def _storage(plan: Plan) -> dict[str, Layout]:
    return {p.name: p.storage for p in plan.parameters}


def _ops(plan: Plan, scope: str) -> list[NodePlan]:
    return [node for node in plan.nodes if node.scope == scope and node.inputs and node.outputs]


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_layout_can_be_forbidden() -> None:
    problem = stack(2)
    pinned = planned(problem, "param:blocks.*.up.weight = S0")
    assert all(str(_storage(pinned)[f"blocks.{i}.up.weight"]) == "S0" for i in range(3))
    both = planned(problem, "param:blocks.*.up.weight = S0", "param:blocks.1.up.weight != S1")
    assert _storage(both) == _storage(pinned)
    free = planned(problem, "param:* != R", "param:blocks.*.up.weight != S0")
    assert {str(_storage(free)[f"blocks.{i}.up.weight"]) for i in range(3)} == {"S1"}
    assert "R" not in map(str, _storage(free).values())


def test_what_a_module_gives_can_be_forbidden() -> None:
    problem = stack(2)
    free = planned(problem)
    [given] = {str(node.outputs[0].value()) for node in _ops(free, "blocks.0.norm")[-1:]}
    other = planned(problem, f"activation:blocks.?.norm != {given}")
    assert all(str(_ops(other, f"blocks.{i}.norm")[-1].outputs[0].value()) != given for i in range(3))
    assert other.predicted.step_seconds >= free.predicted.step_seconds


def test_preferred_layouts_are_taken_where_they_can_be() -> None:
    problem = stack(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned(problem, "param:* ~ S1")
    for name, storage in _storage(plan).items():
        assert str(storage) == "S1" or problem.memory.parameters[name].dim() == 1


def test_preferred_layouts_give_way_to_pins_and_to_the_budget() -> None:
    problem = stack(2)
    plan = planned(problem, "param:* ~ S1", "param:head.weight = S0")
    assert str(_storage(plan)["head.weight"]) == "S0"
    with pytest.raises(InfeasibleError) as refused:
        planned(problem, budget=1)
    smallest = refused.value.smallest_budget_bytes
    assert smallest is not None
    with pytest.raises(InfeasibleError):
        planned(problem, "param:* = R", budget=smallest)
    with pytest.warns(PreferenceWarning, match=r"no plan fits with 'param:\* ~ R'"):
        plan = planned(problem, "param:* ~ R", budget=smallest)
    assert plan.predicted.peak_bytes <= smallest


def test_one_placement_for_all_axes_is_either_order_of_splitting() -> None:
    problem = stack(2, 4)
    plan = planned(problem, "param:blocks.*.weight = S0")
    for name, storage in _storage(plan).items():
        if name.startswith("blocks.") and name.endswith(".weight"):
            assert str(storage) == "S0,S0@2"
    given = planned(problem, "activation:blocks.0.norm = S0")
    assert str(_ops(given, "blocks.0.norm")[-1].outputs[0]) in ("S0,S0@2", "S0@4,S0")


class _Twice(nn.Module):
    """Calls one module twice, which returns a tensor and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _WithLoss()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once, loss = self.inner(x)
        again, more = self.inner(self.norm(once))
        return again.sum() + loss + more


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.up(x).relu()
        return y, y.mean()


@pytest.mark.parametrize("layout", ["S0", "S1", "R"])
def test_pins_of_activations_hold_at_each_call_and_for_all_that_a_module_gives(layout: str) -> None:
    problem = toy(on_meta(_Twice), torch.empty(512, 16, device="meta"), on=cluster(2))
    plan = planned(problem, f"activation:inner = {layout}")
    given = [node for node in plan.nodes if node.scope == "inner" and "relu" in node.target]
    assert [str(node.outputs[0].value()) for node in given] == [layout, layout]


def _sums(plan: Plan) -> dict[str, int]:
    """Number of reductions of activations or their gradients over the axis, by kind of collective."""
    found: dict[str, int] = {}
    for c in plan.collectives:
        if c.cause == "activations" and c.kind != "all_gather" and c.bytes > 1024:
            found[c.kind] = found.get(c.kind, 0) + c.count
    return found


# -- roles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "roles"),
    [
        ("ddp", ("ddp", "ddp")),
        ("fsdp", ("fsdp", "fsdp")),
        ("tp", ("ddp", "tp")),
        ("fsdp+tp", ("fsdp", "tp")),
        ("fsdp+tp(zero=2, sequence=split)", ("fsdp(zero=2)", "tp(sequence=split)")),
        ("hsdp", ("ddp", "fsdp")),
    ],
)
def test_a_preset_is_what_its_roles_are(preset: str, roles: tuple[str, str]) -> None:
    problem = stack(2, 4)
    one = planned(problem, preset)
    other = planned(problem, f"axis:axis0 = {roles[0]}", f"axis:1 = {roles[1]}")
    assert (one.nodes, one.parameters) == (other.nodes, other.parameters)


def test_an_axis_for_the_batch_splits_no_weight() -> None:
    problem = stack(2, 4)
    plan = planned(problem, "axis:0 = dp")
    parameters = {p.name for p in plan.parameters}
    nodes = list(problem.graph.nodes)
    read = [
        layout
        for node in plan.nodes
        for ref, layout in zip(problem.memory.inputs[nodes[node.position]], node.inputs, strict=True)
        if str(ref.node.target) in parameters
    ]
    assert len(read) >= len(parameters)
    assert all(layout[0].is_replicated for layout in read)


def test_two_schemes_for_one_axis_are_refused() -> None:
    problem = stack(2, 2)
    for texts in (["ddp", "fsdp"], ["tp", "ddp"], ["fsdp", "axis:0 = ddp"], ["axis:0 = dp", "axis:axis0 = tp"]):
        with pytest.raises(InputError, match="both give axis 'axis0' a role"):
            planned(problem, *texts)


# -- options of presets -----------------------------------------------------------------------------------------------


def test_the_stage_of_zero() -> None:
    problem = stack(4)
    three, two, one = (planned(problem, text) for text in ("fsdp", "fsdp(zero=2)", "fsdp(zero=1)"))
    assert any(p.regather for p in three.parameters)
    assert not any(p.regather for p in two.parameters)
    assert [p.storage.shards((4,)) for p in two.parameters] == [p.storage.shards((4,)) for p in three.parameters]
    assert two.parameters == one.parameters
    assert two.predicted.peak_bytes > three.predicted.peak_bytes
    assert two.predicted.step_seconds < three.predicted.step_seconds


def test_tensor_parallel_with_and_without_sequences_split() -> None:
    problem = stack(4)
    whole, split = (planned(problem, text) for text in ("tp(sequence=whole)", "tp(sequence=split)"))
    assert whole.nodes == planned(problem, "tp").nodes
    for i in range(3):
        assert {str(node.inputs[0].value()) for node in _ops(whole, f"blocks.{i}.norm")} == {"R"}
        assert {str(node.inputs[0].value()) for node in _ops(split, f"blocks.{i}.norm")} == {"S0"}
    assert split.predicted.peak_bytes < whole.predicted.peak_bytes
    assert _sums(split) == {"all_reduce": 2, "reduce_scatter": 7}  # the first block gets its input whole


class _NormOfHeads(nn.Module):
    """A product whose result is split into heads, each normalised, as the queries of Qwen3."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(256, 256), nn.LayerNorm(32), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.norm(self.q(x).unflatten(-1, (8, 32))).flatten(2)).sum()


@pytest.mark.parametrize("text", ["tp", "tp(sequence=split)"])
def test_tensor_parallel_norms_heads_where_they_are(text: str) -> None:
    plan = planned(toy(on_meta(_NormOfHeads), torch.empty(4, 512, 256, device="meta"), on=cluster(4)), text)
    assert [str(node.inputs[0].value()) for node in _ops(plan, "norm")] == ["S2"]


@pytest.mark.parametrize("budget", [None, 1 << 40])
def test_recompute_of_all_blocks(budget: int | None) -> None:
    problem = stack(2)
    plans = {how: planned(problem, f"ddp(recompute={how})", budget=budget) for how in ("never", "selective", "full")}
    assert not plans["never"].recompute
    assert [segment.inner for segment in plans["full"].recompute] == [False] * 3
    assert plans["selective"].recompute
    assert all(segment.inner for segment in plans["selective"].recompute)
    peaks = [plans[how].predicted.peak_bytes for how in ("never", "selective", "full")]
    seconds = [plans[how].predicted.step_seconds for how in ("never", "selective", "full")]
    assert all(more > less for more, less in itertools.pairwise(peaks))
    assert all(less < more for less, more in itertools.pairwise(seconds))


def test_recompute_of_some_blocks() -> None:
    problem = stack(2, blocks=4)
    plan = planned(problem, "recompute:blocks.[12] = full", "recompute:blocks.3 = never")
    [repeat] = problem.repeats
    starts = {segment.first for segment in plan.recompute if not segment.inner}
    assert {repeat.instance(i).start for i in (1, 2)} <= starts
    assert not any(segment.first >= repeat.instance(3).start for segment in plan.recompute)


# -- constraints that cannot hold -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "members"),
    [
        (["recompute:* = never", "fsdp", "param:head.weight = R"], ["fsdp", "param:head.weight = R"]),
        (["param:head.weight != S1", "param:head.* = S1", "param:blocks.* ~ R"], ["!= S1", "= S1"]),
        (["axis:0 = dp", "axis:1 = tp", "param:head.weight = S0,*", "param:head.weight = S1,*"], ["S0,*", "S1,*"]),
        (["param:head.weight != R", "param:head.weight != S*"], None),
        (["param:*.up.weight != R", "param:*.up.weight != S0", "param:*.up.weight != S1"], ["R'", "S0'", "S1'"]),
    ],
)
def test_constraints_that_cannot_hold_together_are_named(texts: list[str], members: list[str] | None) -> None:
    axes = 2 if any(text.startswith("axis") for text in texts) else 1
    problem = stack(*[2] * axes)
    if members is None:
        with pytest.raises(InputError, match="no placement"):
            planned(problem, *texts)
        return
    with pytest.raises(InfeasibleError) as refused:
        planned(problem, *texts)
    message = refused.value.message
    named = [text for text in texts if f"'{text}'" in message.partition(" cannot hold")[0]]
    assert len(named) == len(members)
    assert all(member in message for member in members)
    for left_out in named:  # without any one of them, the others can hold
        planned(problem, *(text for text in named if text != left_out))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp(zero=4)", "'zero=4' is no option of 'fsdp'"),
        ("fsdp(zero=1, zero=3)", "gives 'zero' twice"),
        ("ddp(zero=2)", "which takes: recompute="),
        ("tp(sequence=maybe)", "sequence=whole or split"),
        ("fsdp(zero=2", "is none of ddp"),
        ("axis:9 = tp", "the mesh's axes are called axis0, 0"),
        ("axis:0 = ep", "'ep' is none of dp, ddp, fsdp, tp"),
        ("axis:0", "write 'axis:NAME = role'"),
        ("recompute:* != never", "recompute is pinned with ="),
        ("recompute:* = sometimes", "never, selective, full"),
    ],
)
def test_malformed_ones_say_what_can_be_written(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        planned(stack(2), text)
    assert message in refused.value.message


def test_the_cluster_of_a_plan_is_what_constraints_name_axes_by() -> None:
    on = cluster(2, 2)
    named = Cluster(
        on.device,
        tuple(
            type(axis)(name, axis.size, axis.latency_seconds, axis.bytes_per_s)
            for name, axis in zip(("dp", "tp"), on.axes, strict=True)
        ),
    )
    problem = toy(on_meta(Stack, 3), torch.empty(512, 16, device="meta"), on=named)
    assert planned(problem, "axis:dp = fsdp", "axis:tp = tp").nodes == planned(problem, "fsdp+tp").nodes
