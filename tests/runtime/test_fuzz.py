"""Random small models under random plans that the rules allow, on four simulated ranks, give one process' numbers.

No optimum picks most of these strategies. A failing seed is named; `python tests/runtime/fuzzing.py SEED` replays it.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fuzzing import Fuzzed
from random_plans import random_plan
from simulated import SimulatedMesh

from autopar.layout import Layout, take_shard
from autopar.runtime.collectives import LocalMesh
from autopar.runtime.lowering import Rank, lower
from autopar.strategies import table
from autopar.tracing import trace

MESHES = ((4,), (2, 2))
CPU = torch.device("cpu")


def deviation(seed: int) -> float:
    """The largest difference from one process, relative to the largest number: loss and gradients, over all ranks."""
    model = Fuzzed(seed)
    loss = model(**model.inputs)
    if loss.requires_grad:  # a few draw no parameter
        loss.backward()
    whole = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}
    shape = MESHES[seed % len(MESHES)]
    traced = trace(model, model.inputs)
    plan = random_plan(traced.graph, model, shape, random.Random(seed))
    storage: dict[str, Layout] = {p.name: p.storage for p in plan.parameters}

    def one(mesh: LocalMesh) -> list[float]:
        lowered = lower(traced.graph, traced.root, plan, Rank(mesh, CPU, {}))
        state = {}
        for name in lowered.state:
            tensor = traced.attribute(name)
            part = take_shard(tensor.detach(), storage[name], shape, mesh.coordinate) if name in storage else tensor
            state[name] = part.clone().requires_grad_(tensor.requires_grad)
        values = [model.inputs[node.name] for node in traced.graph.nodes if node.op == "placeholder"]
        (mine,) = lowered.module(*values, *state.values())
        errors = [_relative(mine.detach(), loss.detach())]
        if mine.requires_grad:
            mine.backward()
        for name, part in state.items():
            if part.requires_grad:
                expected = take_shard(whole[name], storage[name], shape, mesh.coordinate)
                errors.append(_relative(part.grad if part.grad is not None else torch.zeros_like(part), expected))
        return errors

    return max(max(errors) for errors in SimulatedMesh(shape).run(one).values())


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / (1 + expected.abs().max())).item()


@pytest.mark.parametrize("seed", range(12))
def test_random_model_under_a_random_plan(seed: int) -> None:
    assert deviation(seed) < 1e-8, f"replay with: python tests/runtime/fuzzing.py {seed}"


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(table.TABLE["softmax"], rule="... -> ...")
    monkeypatch.setitem(table.TABLE, "softmax", wrong)
    monkeypatch.setitem(table.TABLE, "log_softmax", wrong)
    monkeypatch.setitem(table.TABLE, "cumsum", wrong)
    assert any(deviation(seed) > 1e-6 for seed in range(30))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(15))
def test_three_hundred_random_models(block: int) -> None:
    failed = {}
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        try:
            error: object = deviation(seed)
        except Exception as problem:  # told with its seed, with those of the other models
            error = f"{type(problem).__name__}: {problem}"
        if not isinstance(error, float) or not error < 1e-8:
            failed[seed] = error
    assert not failed, f"replay with: python tests/runtime/fuzzing.py {' '.join(map(str, failed))}"
