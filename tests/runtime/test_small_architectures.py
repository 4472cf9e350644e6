"""Many architectures, small, on four simulated ranks: one process' loss and gradients under three kinds of plans."""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).parent))
from deviation import deviation
from promotion import Promotion
from random_plans import random_plan
from small_architectures import MODELS

from autopar import Cluster
from autopar.planning import Stopwatch, prepare, request_of
from autopar.plans import Plan
from autopar.tracing import Traced, trace

KINDS = ("unconstrained", "forced", "random")
FEW = ("llama", "mixtral", "t5", "convnext")


def plan_of(kind: str, name: str, model: nn.Module, traced: Traced, shape: tuple[int, ...]) -> Plan:
    """The best plan on cheap links; the best of those with tensor parallelism on the second axis; any plan."""
    if kind == "random":
        return random_plan(traced.graph, model, shape, random.Random(name))
    constraints = "fsdp+tp" if kind == "forced" else ()
    request = request_of(_with_cheap_links(shape), "100GiB", None, 1, "adamw", constraints, None, "global", 60)
    return prepare(model, traced, request, Stopwatch()).solve(
        memory_budget_bytes=request.memory_budget_bytes, constraints=request.constraints
    )


def _with_cheap_links(shape: tuple[int, ...]) -> Cluster:
    """Devices between which moving costs next to nothing, so that small models too are worth splitting."""
    cluster = Cluster.preset("cpu", shape)
    axes = [dataclasses.replace(axis, latency_seconds=1e-12, bytes_per_s=1e15) for axis in cluster.axes]
    device = dataclasses.replace(cluster.device, launch_seconds=0.0)
    return dataclasses.replace(cluster, device=device, axes=tuple(axes))


def promote(graph: fx.Graph) -> None:
    """Write the promotion into a graph traced under it: torch's modes do not reach other threads, nor replays."""

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    for node in graph.nodes:
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
        node.args, node.kwargs = (fx.node.map_aggregate(value, wide) for value in (node.args, node.kwargs))


def check(name: str, kinds: tuple[str, ...] = KINDS) -> None:
    with Promotion(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' advice; an op without a rule is told apart elsewhere
        for kind in kinds:
            model, inputs = MODELS[name]()
            traced = trace(model, inputs)
            promote(traced.graph)
            shape = (4,) if kind == "unconstrained" else (2, 2)
            plan = plan_of(kind, name, model, traced, shape)
            assert deviation(model, inputs, traced, plan) < 1e-8, kind


@pytest.mark.parametrize("name", FEW)
def test_some_architectures_under_a_random_plan(name: str) -> None:
    check(name, ("random",))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_architecture(name: str) -> None:
    torch.set_num_threads(1)
    check(name)
