"""Kinds of plans for a small architecture: the best one, the best of a forced kind, and a random one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from random_plans import random_plan
from torch import fx, nn

from autopar import Cluster
from autopar.planning.stages import prepare, request_of
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch
from autopar.tracing import Traced

KINDS = ("unconstrained", "forced", "random")
EXCHANGED = {"exchanged": "t+e", "exchanged over both": "t+e 2"}
# mixtures of experts, whose tokens can be sent to the ranks of their experts
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def kinds_of(name: str) -> tuple[str, ...]:
    """The kinds of plans that an architecture is tested under."""
    return (*KINDS, *EXCHANGED) if name in MIXTURES else KINDS


EXACT = 1e-8  # all computation is in float64, as casts in the model are promoted
GAP = 0.02  # relative gap of the solver: the plans need not be optimal


def mesh_shape(kind: str) -> tuple[int, ...]:
    """A mesh of four ranks for this kind of plan."""
    return (4,) if kind == "unconstrained" else (2, 2)


def plan_of(kind: str, name: str, model: nn.Module, traced: Traced) -> Plan:
    """The best plan for cheap links; for "forced" the best with tensor parallelism on the second axis; or a random
    plan.

    The kinds in `EXCHANGED` are random plans that send tokens to the ranks of their experts, over one axis or both.
    """
    shape = mesh_shape(kind)
    if kind == "random" or kind in EXCHANGED:
        split = EXCHANGED.get(kind, "")
        return random_plan(traced.graph, model, shape, random.Random(name), split=split)
    constraints = "fsdp+tp" if kind == "forced" else ()
    request = request_of(with_cheap_links(shape), "100GiB", None, 1, "adamw", constraints, None, "global", 60)
    return prepare(model, traced, request, Stopwatch()).solve(gap=GAP)


def with_cheap_links(shape: tuple[int, ...]) -> Cluster:
    """A cluster with almost free communication, so that even small models are worth sharding."""
    cluster = Cluster.preset("cpu", shape)
    axes = [dataclasses.replace(axis, latency_seconds=1e-12, bytes_per_s=1e15) for axis in cluster.axes]
    device = dataclasses.replace(cluster.device, launch_seconds=0.0)
    return dataclasses.replace(cluster, device=device, axes=tuple(axes))


def promote(graph: fx.Graph) -> None:
    """Apply the promotion to a graph traced under it, since torch modes reach neither other threads nor replays."""

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    for node in graph.nodes:
        if node.op == "call_method" and node.target == "float":
            node.target = "double"
        node.args, node.kwargs = (fx.node.map_aggregate(value, wide) for value in (node.args, node.kwargs))


def splits(plan: Plan) -> bool:
    """Whether the plan shards the output of some op."""
    return any(p.is_sharded for node in plan.nodes for layout in node.outputs for p in layout.placements)
