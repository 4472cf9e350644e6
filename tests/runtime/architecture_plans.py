"""Three kinds of plans for a small architecture: the best, the best of a forced kind, and one drawn at random."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from random_plans import random_plan
from torch import fx, nn

from autopar import Cluster
from autopar.planning.stages import Stopwatch, prepare, request_of
from autopar.plans import Plan
from autopar.tracing import Traced

KINDS = ("unconstrained", "forced", "random")
EXCHANGED = {"exchanged": "t+e", "exchanged over both": "t+e 2"}
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")  # whose tokens go to the ranks of their experts


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of plans that an architecture runs under."""
    return (*KINDS, *EXCHANGED) if name in MIXTURES else KINDS


EXACT = 1e-8  # float64, with the model's own casts promoted
GAP = 0.02  # these plans need not be the best ones


def mesh_shape(kind: str) -> tuple[int, ...]:
    """Four ranks."""
    return (4,) if kind == "unconstrained" else (2, 2)


def plan_of(kind: str, name: str, model: nn.Module, traced: Traced) -> Plan:
    """The best plan on cheap links; the best of those with tensor parallelism on the second axis; any plan.

    "exchanged" is any plan in which tokens are sent to their experts, over one axis or both.
    """
    shape = mesh_shape(kind)
    if kind == "random" or kind in EXCHANGED:
        split = EXCHANGED.get(kind, "")
        return random_plan(traced.graph, model, shape, random.Random(name), split=split)
    constraints = "fsdp+tp" if kind == "forced" else ()
    request = request_of(with_cheap_links(shape), "100GiB", None, 1, "adamw", constraints, None, "global", 60)
    return prepare(model, traced, request, Stopwatch()).solve(gap=GAP)


def with_cheap_links(shape: tuple[int, ...]) -> Cluster:
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


def splits(plan: Plan) -> bool:
    """Whether some op does a part of its work."""
    return any(p.is_sharded for node in plan.nodes for layout in node.outputs for p in layout.placements)
