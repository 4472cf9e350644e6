"""Recompute requested for parts of blocks, or for single blocks: exactly what is named, or an error."""

from __future__ import annotations

import pytest
import torch
from thinned import thinned
from torch import nn
from toys import Stack, Toy, cluster, on_meta, planned, stack, toy

from autopar import Cluster, plan
from autopar.cost.structure.blocks import repeats_under
from autopar.errors import InfeasibleError, InputError
from autopar.graph import SCOPE, output_tensors
from autopar.plans import Plan
from autopar.solver.constraints.constraints import restrict
from autopar.solver.constraints.idle_constraints import ConstraintWarning


def _replayed(problem: Toy, plan: Plan) -> set[str]:
    """The modules, or blocks for their own function calls ("blocks.0"), whose ops save tensors and are recomputed."""
    nodes = list(problem.graph.nodes)
    inside = (node for s in plan.recompute for node in nodes[s.first : s.last + 1])
    return {node.meta[SCOPE][-1][0] for node in inside if output_tensors(node) and problem.memory.saves(node)}


def _of_blocks(parts: str, *blocks: int) -> set[str]:
    return {f"blocks.{i}{part and '.'}{part}" for i in blocks for part in parts.split("|")}


ALL = "|up|down|norm"  # "": ops of the block itself, which calls gelu


@pytest.mark.filterwarnings("ignore:.* saves no memory")  # a single op that saves only its input
@pytest.mark.parametrize(
    ("texts", "replayed"),
    [
        (["recompute:blocks.*.up = full"], _of_blocks("up", 0, 1, 2, 3)),
        (["recompute:blocks.*.up = full", "recompute:blocks.*.norm = full"], _of_blocks("up|norm", 0, 1, 2, 3)),
        (["recompute:blocks.2.down = full"], _of_blocks("down", 2)),
        (["recompute:blocks.0 = full"], _of_blocks(ALL, 0)),
        (["recompute:blocks.3 = full", "recompute:blocks.1.norm = full"], _of_blocks(ALL, 3) | {"blocks.1.norm"}),
        (["recompute:blocks.* = full", "recompute:blocks.*.norm = never"], _of_blocks("|up|down", 0, 1, 2, 3)),
        (["recompute:blocks.* = full", "recompute:blocks.[13].up = never"], None),
        (["recompute:* = full", "recompute:blocks.1 = never"], _of_blocks(ALL, 0, 2, 3)),
        (["ddp(recompute=full)", "recompute:blocks.2.down = never"], None),
    ],
)
def test_exactly_what_is_named_is_recomputed(texts: list[str], replayed: set[str] | None) -> None:
    problem = stack(2, blocks=4)
    found = _replayed(problem, planned(problem, *texts))
    if replayed is None:
        [never] = [text for text in texts if "never" in text]
        barred = {f"blocks.{i}.up" for i in (1, 3)} if ".up" in never else {"blocks.2.down"}
        replayed = _of_blocks(ALL, 0, 1, 2, 3) - barred
    assert found == replayed


def test_a_part_that_must_be_kept_leaves_the_rest_to_the_planner() -> None:
    problem, text = stack(2, blocks=4), "recompute:blocks.*.down = never"
    with pytest.raises(InfeasibleError) as refused:
        planned(problem, text, budget=1)
    found = _replayed(problem, planned(problem, text, budget=refused.value.smallest_budget_bytes))
    assert found
    assert not found & _of_blocks("down", 0, 1, 2, 3)


def test_a_part_of_a_part() -> None:
    problem = stack(2, blocks=4)
    plan = planned(problem, "recompute:blocks.* = selective", "recompute:blocks.*.norm = never")
    assert "blocks.0" in _replayed(problem, plan)
    assert not any("norm" in name for name in _replayed(problem, plan))
    with pytest.warns(
        ConstraintWarning, match=r"a part of 'blocks\.0', but no part .* nothing of it is recomputed; ask for full"
    ):
        plan = planned(problem, "recompute:blocks.*.up = selective")  # a single op
    assert not plan.recompute


PINNED = [
    ["recompute:blocks.*.up = full"],
    ["recompute:blocks.[12].up = full", "recompute:blocks.*.norm = never"],
    ["recompute:blocks.0 = full"],
    ["recompute:blocks.3 = selective"],
    ["param:blocks.1.up.weight = S0"],
]


@pytest.mark.parametrize(("texts", "budgets"), thinned(2, PINNED, [1.0, 1.2]))
def test_what_the_program_counts_is_what_is_predicted(texts: list[str], budgets: float) -> None:
    problem = stack(2, blocks=4)
    left = restrict(problem.restricted.strategies, problem.memory, texts, problem.cluster.axis_names)
    repeats = repeats_under(problem.graph, left.marks)
    asked = Toy(problem.memory, left, problem.cluster, repeats)
    least = asked.smallest_budget()
    solution = asked.solve(least * budgets + 1)
    told = asked.predict(solution)
    assert told.step_seconds == pytest.approx(solution.seconds, rel=1e-6)
    assert told.peak_bytes <= least * budgets + 64
    with pytest.raises(InfeasibleError):
        asked.solve(least * 0.99)


class _Twice(nn.Module):
    """Reads one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).relu().sum(-1, keepdim=True) * x


@pytest.mark.filterwarnings("ignore:.* saves no memory")  # a single op that saves only its input
def test_a_part_that_cannot_be_recomputed_by_itself_is_refused() -> None:
    inputs, mesh = {"input": torch.empty(64, 16, device="meta")}, Cluster.preset("cpu", (2,))
    for model, leaf, why in (
        (nn.Sequential(*(_Twice() for _ in range(3))), [], "a parameter that it reads is read elsewhere too"),
        (nn.Sequential(*(_Twice() for _ in range(3))), ["leaf:*.b"], "the block holds a leaf"),
    ):
        part = "recompute:*.a = full"
        with pytest.raises(
            InputError, match=rf"recompute '0\.a' without the rest of '0', but {why}.*: ask for the whole"
        ):
            plan(model, inputs, mesh, constraints=[*leaf, part], loss_fn=torch.sum)
        whole = plan(model, inputs, mesh, constraints=[*leaf, "recompute:? = full"], loss_fn=torch.sum)
        assert [segment.name for segment in whole.recompute] == ["0", "1", "2"]


def test_what_lies_in_no_block_is_refused_by_the_constraint_that_names_it() -> None:
    with pytest.raises(
        InputError, match=r"'recompute:head = full' names nothing .*here those from 'blocks\.0' to 'blocks\.2'"
    ):
        planned(stack(2), "recompute:blocks.* = full", "recompute:head = full")
    alone = toy(on_meta(Stack, 1), torch.empty(8, 16, device="meta"), on=cluster(2))
    with pytest.raises(
        InputError, match=r"ask for recompute, but only blocks are recomputed of which .* this model has none"
    ):
        planned(alone, "ddp(recompute=full)")


def test_what_keeps_nothing_is_refused() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Unflatten(1, (2, 4)), nn.Flatten(1)) for _ in range(3)]
    model, inputs = nn.Sequential(*blocks), {"input": torch.empty(64, 8, device="meta")}
    with pytest.raises(InputError, match=r"'recompute:\*\.2 = full' names nothing .* that keep something"):
        plan(model, inputs, Cluster.preset("cpu", (2,)), constraints="recompute:*.2 = full", loss_fn=torch.sum)
