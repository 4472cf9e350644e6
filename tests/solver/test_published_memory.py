"""Plans whose feasibility is published: what fits in memory, and how many blocks must be recomputed for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import Cluster, InfeasibleError, Plan, plan
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.step import predict
from autopar.cost.structure.blocks import find_repeats
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.plans import Prediction
from autopar.solver.building import build_problem
from autopar.solver.constraints.constraints import restrict
from autopar.solver.memory.rows import Rows
from autopar.solver.model import Model
from autopar.solver.seconds.objective import run
from autopar.solver.solution import Solution, read_solution
from autopar.stopwatch import Stopwatch


def llama(width: int, hidden: int, layers: int, heads: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=32000,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def tokens(batch: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(batch, 2048, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def with_zero_2(model: nn.Module, batch: int, cluster: Cluster, budget_bytes: float) -> tuple[Solution, Prediction]:
    """The fastest plan that splits the batch, shards parameters, and keeps gathered parameters until their gradients
    are made; blocks are recomputed as a whole."""
    request, watch = request_of(cluster, precision="bf16"), Stopwatch()
    prepared = prepare(model, trace_for(model, tokens(batch), None, request, watch), request, watch)
    graph, parameters = prepared.traced.graph, dict(model.named_parameters())
    memory = memory_on(cluster, graph, parameters, request.precision, "adamw", 1)
    restricted = restrict(prepared.strategies, memory, ("fsdp",), cluster.axis_names)
    restricted = replace(restricted, regather=dict.fromkeys(restricted.regather, False))
    repeats = find_repeats(graph)
    made = Model(build_problem(memory, restricted, cluster, repeats, inner_levels=0))
    Rows(made, budget_bytes)
    solution = read_solution(made, run(made, "highs", 60.0, 1e-3))
    chosen = solution.chosen, solution.parameters, solution.segments
    return solution, predict(memory, cluster, *chosen, repeats)[0]


def reads(made: Plan) -> set[str]:
    """The layouts in which the products read their weights."""
    return {str(node.inputs[1]) for node in made.nodes if node.target.endswith("linear")}


def test_a10_llama2_7b_on_eight_devices_of_36_gb() -> None:
    """Published: ZeRO-2 with 20 of 32 blocks recomputed, from a profile in which a block saves 514.56 MiB for each
    sample (32 if recomputed). The block of Transformers saves less, so fewer must be recomputed; with the profile's
    bytes the solver also finds 20.
    """
    model, cluster, budget = llama(4096, 11008, 32, 32), Cluster.preset("a100-80", (8,)), 36e9
    solution, predicted = with_zero_2(model, 16, cluster, budget)
    assert predicted.peak_bytes <= budget
    blocks = [moment.parts for moment in predicted.moments if ".layers." in moment.name]
    recomputed = len(solution.segments)
    keeps = blocks[-1]["activations"] - blocks[-2]["activations"]
    keeps_inputs = blocks[1]["activations"] - blocks[0]["activations"]
    assert keeps_inputs == 2 * (2 * 2048 * 4096), "two samples a device in bfloat16"
    elsewhere = predicted.peak_bytes - recomputed * keeps_inputs - (32 - recomputed) * keeps
    kept = (budget - elsewhere - 32 * 2 * 32 * 2**20) // (2 * (514.56 - 32) * 2**20)
    assert 18 <= 32 - kept <= 22
    fewest = math.ceil(32 - (budget - elsewhere - 32 * keeps_inputs) / (keeps - keeps_inputs))
    assert fewest <= recomputed <= fewest + 1, "the rows are never less than the prediction, and hardly more"
    free = plan(model, tokens(16), cluster, precision="bf16", memory_budget=int(budget))
    assert reads(free) == {"R+"}, "no tensor parallelism"
    assert free.predicted.step_seconds <= predicted.step_seconds * (1 + 1e-3)
    with pytest.raises(InfeasibleError):  # nor does any plan fit that keeps parameters and optimizer states unsharded
        plan(model, tokens(16), cluster, precision="bf16", memory_budget=int(budget), constraints="ddp")


@pytest.mark.parametrize(("mesh", "constraints"), [((64,), ("fsdp",)), ((32, 2), ("fsdp+tp",))], ids=str)
def test_a11_llama_13b_on_64_devices_of_80_gb(mesh: tuple[int, ...], constraints: Sequence[str]) -> None:
    """Without recompute both plans fit, and one sequence per device without tensor parallelism is the faster one."""
    model = llama(5120, 13824, 40, 40)
    cluster = Cluster.preset("a100-80", mesh)
    made = plan(model, tokens(64), cluster, precision="bf16", constraints=[*constraints, "recompute:* = never"])
    assert not made.recompute and made.predicted.peak_bytes <= cluster.device.memory_bytes
    if len(mesh) == 1:
        assert reads(made) == {"R+"}
        slower = plan(model, tokens(64), Cluster.preset("a100-80", (8, 8)), precision="bf16", constraints="fsdp+tp")
        assert made.predicted.step_seconds < slower.predicted.step_seconds
