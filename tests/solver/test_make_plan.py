"""`make_plan`: the plan it returns, budgets that are too small, constraints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toys import Stack, Toy, cluster, on_meta, toy

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, InputError
from autopar.layout import Layout
from autopar.plan_request import PlanRequest
from autopar.plans import Plan
from autopar.solver import make_plan


def _stack(on: Cluster, blocks: int = 3) -> Toy:
    return toy(on_meta(Stack, blocks), torch.empty(512, 16, device="meta"), on=on)


def _plan(problem: Toy, **options: object) -> Plan:
    return make_plan(problem.given, problem.cluster, PlanRequest(**options))  # type: ignore[arg-type]


def _storage(plan: Plan) -> dict[str, str]:
    return {p.name: str(p.storage) for p in plan.parameters}


def test_the_same_input_gives_the_same_plan_and_json_keeps_it() -> None:
    problem = _stack(cluster(2, 2))
    plan = _plan(problem, memory_budget_bytes=400_000)
    assert plan.predicted.peak_bytes <= 400_000
    again = _plan(problem, memory_budget_bytes=400_000)
    assert plan.nodes == again.nodes and plan.parameters == again.parameters and plan.recompute == again.recompute
    assert plan.certificate.gap <= 1e-3 and plan.certificate.bound <= plan.certificate.objective
    plan = replace(plan, fingerprints={"graph": "", "model": "", "mesh": "2x2"})  # the planning stages add fingerprints
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_budget_of_what_a_plan_takes_has_that_plan(part: float) -> None:
    """The budget is used to the byte: a former safety margin of a millionth made a plan miss its own peak as budget."""
    problem = _stack(cluster(4, seed=1))
    with pytest.raises(InfeasibleError) as refused:
        _plan(problem, memory_budget_bytes=1)
    least, most = refused.value.smallest_budget_bytes, _plan(problem, memory_budget_bytes=1 << 40).predicted.peak_bytes
    assert least is not None
    made = _plan(problem, memory_budget_bytes=int(least + part * (most - least)), gap=1e-7)
    again = _plan(problem, memory_budget_bytes=made.predicted.peak_bytes, gap=1e-7)
    assert again.predicted.peak_bytes <= made.predicted.peak_bytes
    assert again.predicted.step_seconds <= made.predicted.step_seconds * (1 + 1e-6)


def test_too_small_a_budget_states_the_smallest() -> None:
    problem = _stack(cluster(2))
    with pytest.raises(InfeasibleError, match="smallest budget") as found:
        _plan(problem, memory_budget_bytes=10_000)
    smallest = found.value.smallest_budget_bytes
    assert smallest is not None
    assert _plan(problem, memory_budget_bytes=smallest).predicted.peak_bytes <= smallest
    with pytest.raises(InfeasibleError):
        _plan(problem, memory_budget_bytes=smallest * 95 // 100)


@pytest.mark.parametrize(("kind", "part"), [("cuda", 0.95), ("cpu", 1.0)])
def test_without_a_budget_a_plan_takes_what_the_device_can_give(kind: str, part: float) -> None:
    problem = _stack(cluster(2, kind=kind))
    peak = _plan(problem).predicted.peak_bytes
    for memory, fits in ((peak / part * 1.001, True), (peak / part * 0.999, False)):
        device = replace(problem.cluster.device, memory_bytes=int(memory))
        made = _plan(replace(problem, cluster=replace(problem.cluster, device=device)))
        assert (made.predicted.peak_bytes == peak) == fits and made.predicted.peak_bytes <= part * memory


def test_both_solvers_agree() -> None:
    problem = _stack(cluster(2), blocks=2)
    seconds = [_plan(problem, memory_budget_bytes=450_000, solver=s).predicted.step_seconds for s in ("highs", "cbc")]
    assert seconds[0] == pytest.approx(seconds[1], rel=2e-3)


def test_permuting_axes_leaves_the_cost() -> None:
    def seconds(on: Cluster) -> float:
        return _plan(_stack(on, 2), memory_budget_bytes=300_000, gap=1e-5).predicted.step_seconds

    on = cluster(2, 4, seed=5)
    # two axes on one dim split it in mesh order, so the order decides which of them can be gathered first
    assert seconds(on) == pytest.approx(seconds(Cluster(on.device, on.axes[::-1])), rel=0.01)


def test_presets() -> None:
    problem = _stack(cluster(2, 2))
    assert set(_storage(_plan(problem, constraints=("ddp",))).values()) == {"R,R"}
    fsdp = _plan(problem, constraints=("fsdp",))
    assert all(p.storage.shards((2, 2)) == 4 for p in fsdp.parameters)
    assert all(p.regather for p in fsdp.parameters if p.name.endswith("down.weight"))
    hsdp = _plan(problem, constraints=("hsdp",))
    assert all(str(p.storage).startswith("R,S") for p in hsdp.parameters)
    both = _storage(_plan(problem, constraints=("fsdp+tp",)))
    assert both["blocks.0.up.weight"].endswith(",S0") and both["blocks.0.down.weight"].endswith(",S1")


def test_tensor_parallel_preset_is_megatron() -> None:
    plan = _plan(_stack(cluster(2, compute=False)), constraints=("tp",))
    storage = _storage(plan)
    assert all(
        storage[f"blocks.{i}.up.weight"] == "S0" and storage[f"blocks.{i}.down.weight"] == "S1" for i in range(3)
    )
    assert not any(c.cause.startswith("parameter") and c.bytes > 1024 for c in plan.collectives)


def test_pins() -> None:
    problem = _stack(cluster(2))
    pins = ("param:blocks.1.up.weight = S1", "activation:blocks.0.norm = R")
    plan = _plan(problem, constraints=pins)
    assert _storage(plan)["blocks.1.up.weight"] == "S1"
    [norm] = [n for n in plan.nodes if n.scope == "blocks.0.norm" and n.outputs][-1:]
    assert norm.outputs[0].value() == Layout.parse("R")
    assert plan.constraints == pins


def test_recompute_can_be_forbidden() -> None:
    problem = _stack(cluster(2))
    with pytest.raises(InfeasibleError) as found:
        _plan(problem, memory_budget_bytes=10_000)
    smallest = found.value.smallest_budget_bytes
    assert smallest is not None
    assert _plan(problem, memory_budget_bytes=smallest).recompute
    with pytest.raises(InfeasibleError):
        _plan(problem, memory_budget_bytes=smallest, constraints=("recompute:* = never",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero3", "no preset"),
        ("param:nothing.* = R", "matches nothing"),
        ("param:head.weight = S0,S1", "2 placements"),
        ("param:head.weight = Q", "no placement"),
        ("recompute:blocks.* = always", "never"),
        ("hsdp", "two axes"),
        ("param:head = S0", r"no parameter is called 'head': did you mean 'head\.\*'\?"),
        ("param:block.*.up.wieght ~ S0", r": did you mean 'blocks\.\*\.up\.weight'\?"),
        ("recompute:layers.bocks.0 = full", r": did you mean 'blocks\.0'\?"),
        ("activation:norm = S0", r": did you mean '\*\.norm'\?"),
        ("output:logits = R", r"no output is called 'logits'; its places are 0$"),
        ("param:mlp.gate = S0", r"no parameter is called 'mlp\.gate'$"),
        ("params:head.weight = S0", r"Did you mean 'param:head\.weight = S0'\?"),
    ],
)
def test_bad_constraints(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _plan(_stack(cluster(2)), constraints=(text,))


def test_contradicting_pins_are_named() -> None:
    with pytest.raises(InfeasibleError, match=r"S0' and 'param:head.\* = S1' cannot hold together"):
        _plan(_stack(cluster(2)), constraints=("param:head.weight = S0", "param:head.* = S1"))


def test_pinned_storage_is_kept_and_forward_alone_needs_no_gradients() -> None:
    problem = _stack(cluster(2))
    pinned = {name: Layout.parse("S0") for name in ("head.weight", "embed.weight")}
    plan = make_plan(replace(problem.given, pinned=pinned, train=False), problem.cluster, PlanRequest())
    assert all(_storage(plan)[name] == "S0" for name in pinned)
    assert not any(c.phase != "forward" for c in plan.collectives)
    assert "gradients" not in plan.predicted.parts


@pytest.mark.parametrize("text", ["fsdp(recompute=full)", "recompute:blocks.* = full"])
def test_recompute_is_asked_of_later_calls_where_they_have_such_blocks(text: str) -> None:
    """A loop may have frozen layers since, so that no two blocks are alike, or these keep nothing."""
    problem = _stack(cluster(2))
    first, later = replace(problem.given, repeats=()), replace(problem.given, repeats=(), pinned={})
    with pytest.raises(InputError, match=r"be recomputed|ask for recompute"):
        make_plan(first, problem.cluster, PlanRequest(constraints=(text,)))
    assert make_plan(later, problem.cluster, PlanRequest(constraints=(text,))).recompute == ()
