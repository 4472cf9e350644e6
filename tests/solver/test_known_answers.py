"""Planning problems whose best plan is published or has a closed form."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from toys import Stack, Toy, cluster, on_meta, toy

from autopar import Cluster, InfeasibleError, Plan, plan
from autopar.cost.buckets.grouping import Grouping
from autopar.cost.traffic import announced
from autopar.graph import target_name
from autopar.solver.constraints.restricted import Restricted
from autopar.solver.solution import Solution

WIDTH, RANKS = 64, 4


class MLP(nn.Module):
    """h → 4h → h, whose input needs a gradient if `gradient`, and whose result feeds a norm."""

    def __init__(self, width: int, gradient: bool = True) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(1), requires_grad=gradient)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(functional.relu(self.up(x * self.gain)))
        return functional.layer_norm(y, (y.shape[-1],)).square().mean()


def _linears(problem: Toy) -> list[fx.Node]:
    return [n for n in problem.graph.nodes if target_name(n).endswith(("linear", "mm", "matmul"))]


def _mlp(tokens: int, *, gradient: bool = True) -> Toy:
    """The input's gradient is required as a whole: otherwise the ops before could pass a partial gradient on to their
    own parameters. As compute costs nothing here, both products must be split: replicated work would be free.
    """
    module = on_meta(MLP, WIDTH, gradient)
    problem = toy(module, torch.empty(tokens, WIDTH, device="meta"), on=cluster(RANKS, compute=False))
    strategies = dict(problem.restricted.strategies)
    for node in problem.graph.nodes:
        if node in _linears(problem):
            strategies[node] = tuple(s for s in strategies[node] if s.work < 1)
        elif target_name(node).endswith("mul"):
            strategies[node] = tuple(s for s in strategies[node] if not s.outputs[0][0].partial_grad)
    problem.restricted = Restricted(strategies)
    return problem


def _weights(problem: Toy, solution: Solution) -> list[str]:
    """The layouts in which the products read their weights."""
    return [str(solution.chosen[node].inputs[1]) for node in _linears(problem)]


SWEPT = [WIDTH, 2 * WIDTH, 4 * WIDTH - RANKS, 4 * WIDTH + RANKS, 8 * WIDTH, 16 * WIDTH]


@pytest.mark.parametrize("tokens", SWEPT)
def test_a1_data_parallel_against_tensor_parallel(tokens: int) -> None:
    problem = _mlp(tokens)
    solution = problem.solve()
    wanted = ["R+", "R+"] if tokens > 4 * WIDTH else ["S0", "S1"]
    assert _weights(problem, solution) == wanted
    stored = [str(p.storage) for name, p in solution.parameters.items() if name != "gain"]
    assert stored == (["R", "R"] if tokens > 4 * WIDTH else ["S0", "S1"])


@pytest.mark.parametrize("tokens", [4 * WIDTH, 8 * WIDTH - RANKS, 8 * WIDTH + RANKS, 16 * WIDTH])
def test_a1_without_the_inputs_gradient_flips_at_twice_the_tokens(tokens: int) -> None:
    """Without the input's gradient tensor parallelism communicates T·h in forward and nothing in backward."""
    problem = _mlp(tokens, gradient=False)
    wanted = ["R+", "R+"] if tokens > 8 * WIDTH else ["S0", "S1"]
    assert _weights(problem, problem.solve()) == wanted


def test_a1_tie() -> None:
    """At T = 4h both cost 2 · 8h² elements in ring collectives (apart from the gain's single element)."""
    seconds = _mlp(4 * WIDTH).solve().seconds
    volume = 2 * (RANKS - 1) / RANKS * 8 * WIDTH**2 * 4
    assert seconds == pytest.approx(volume / 1e9, rel=1e-3)


def test_a2_megatron() -> None:
    """Weights too large for one device: communication of one all-reduce in forward and one in backward, and the 4h
    activation is never gathered."""
    tokens = WIDTH // 2
    problem = _mlp(tokens)
    budget = 1.02 * problem.smallest_budget()
    weight = 4 * WIDTH * WIDTH * 4
    assert budget < 4 * weight, "a whole weight with its states does not fit"
    solution = problem.solve(budget)
    assert _weights(problem, solution) == ["S0", "S1"]
    grouping = Grouping(problem.memory, problem.repeats)
    given = problem.memory, problem.cluster, solution.chosen, solution.parameters, solution.segments, grouping
    moved = [c for c in announced(*given).collectives if c.bytes > 64]
    assert max(c.bytes for c in moved) <= tokens * WIDTH * 4, "the 4h activation moves"
    all_reduce = 2 * (RANKS - 1) / RANKS * tokens * WIDTH * 4 / 1e9  # or an equivalent reduce-scatter and all-gather
    assert sum(c.seconds for c in moved) == pytest.approx(2 * all_reduce)


def test_a5_gpt2_on_eight_large_devices_is_plain_data_parallel() -> None:
    """Under the assumptions of the published answer: memory traffic, hence the optimizer, is free; nothing overlaps."""
    preset = Cluster.preset("h100-80", (8,))
    free = float("inf")
    device = replace(preset.device, bytes_per_s=free, update_bytes_per_s=free, overlap=0.0)
    made = _gpt2(replace(preset, device=device))
    assert {str(p.storage) for p in made.parameters} == {"R"} and not made.recompute
    assert _products(made) == {"S0"}, "every product works on its part of the batch"
    [sums] = {c.kind for c in made.collectives if c.cause.startswith("bucket")}
    assert sums == "all_reduce"
    parameters = sum(math.prod(p.shape) for p in made.parameters)
    summed = sum(c.bytes * c.count for c in made.collectives if c.phase == "backward")
    assert summed == pytest.approx(2 * parameters, rel=1e-3)  # the position embedding's as an activation's


def test_a5_fast_links_do_not_turn_it_away() -> None:
    """With all costs counted the batch is still split; parameters are sharded too, to save optimizer traffic."""
    made = _gpt2(Cluster.preset("h100-80", (8,)))
    assert _products(made) == {"S0"}
    assert 0 < made.predicted.hidden_seconds <= made.predicted.comm_seconds


def test_a5_less_memory_never_is_faster() -> None:
    """From a budget that does not bind to the smallest one: data parallel, then sharded states, then recompute."""
    preset = Cluster.preset("h100-80", (8,))
    with pytest.raises(InfeasibleError) as refused:
        _gpt2(preset, budget=1)
    least, most = refused.value.smallest_budget_bytes, _gpt2(preset).predicted.peak_bytes
    assert least is not None
    seconds = []
    for part in (1.0, 0.5, 0.2, 0.0):
        budget = int(least + part * (most - least)) + 1
        made = _gpt2(preset, budget=budget)
        assert made.predicted.peak_bytes <= budget
        seconds.append(made.predicted.step_seconds)
    assert made.recompute
    assert all(less >= more * (1 - 2e-3) for more, less in itertools.pairwise(seconds))


def _gpt2(on: Cluster, budget: int | None = None) -> Plan:
    """The plan of GPT-2 124M with 64 sequences of 1024 tokens in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    ids = torch.empty(64, 1024, dtype=torch.long, device="meta")
    return plan(model, {"input_ids": ids, "labels": ids}, on, precision="bf16", memory_budget=budget)


def _products(made: Plan) -> set[str]:
    return {str(n.outputs[0]) for n in made.nodes if n.target.endswith(("linear", "mm", "attention")) and n.outputs}


def test_a12_trivial_meshes_and_axes_that_divide_nothing() -> None:
    for mesh in ((1, 1), (7,)):
        problem = toy(on_meta(Stack, 2), torch.empty(8, 16, device="meta"), on=cluster(*mesh))
        solution = problem.solve()
        ops = [s for node, s in solution.chosen.items() if node.op != "get_attr"]
        layouts = {str(layout.value()) for s in ops for layout in s.outputs}
        assert layouts == {",".join("R" * len(mesh))}
        assert not solution.segments


def test_a12_one_op() -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x)

    problem = toy(One(), torch.empty(8, 4, device="meta"), on=cluster(2))
    assert problem.solve().seconds <= problem.solve(gap=1e-9).seconds * (1 + 1e-6)
    assert len(problem.solve().chosen) == 3
