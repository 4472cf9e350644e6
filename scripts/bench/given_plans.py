"""Prices a given plan: presets and pins determine the sharding, and the caller says which nodes are recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.step import predict, seconds_of
from autopar.cost.structure.blocks import repeats_under
from autopar.cost.traffic import announced
from autopar.graph import SCOPE
from autopar.layout import Layout
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.plans import Prediction, Segment
from autopar.solver.building import build_problem
from autopar.solver.constraints.constraints import restrict
from autopar.solver.constraints.restricted import Strategies
from autopar.solver.model import Model
from autopar.solver.seconds.objective import run
from autopar.solver.solution import read_solution
from autopar.stopwatch import Stopwatch


@dataclass(frozen=True)
class Priced:
    """A priced step, and the seconds of its forward and backward (with collectives; backward with recompute)."""

    step: Prediction
    forward_seconds: float
    backward_seconds: float


def with_flat_buffers(cluster: Cluster) -> Cluster:
    """The cluster for systems that keep parameters and gradients in the collectives' flat buffers: no copies."""
    rates = [(axis, axis.bytes_per_s) for axis in cluster.axes]
    axes = tuple(replace(axis, gather_bytes_per_s=rate, scatter_bytes_per_s=rate) for axis, rate in rates)
    return replace(cluster, axes=axes)


def before_gather_trees(cluster: Cluster) -> Cluster:
    """The cluster for runs before NCCL 2.23 (2024), whose all-gathers and reduce-scatters only used rings."""
    return replace(cluster, axes=tuple(replace(axis, gather_tree_seconds=None) for axis in cluster.axes))


def price(
    model: nn.Module,
    batch: int,
    sequence: int,
    cluster: Cluster,
    constraints: Sequence[str],
    *,
    precision: str = "bf16",
    micro_batches: int = 1,
    compiled: bool = True,
    recomputed: Sequence[str] = (),
    used_as: Mapping[str, str] | None = None,
) -> Priced:
    """Price one step of a causal language model; `batch`: sequences of a micro-batch over all devices.

    `recomputed`: paths of modules that are recomputed in backward. `used_as`: pattern of parameter names -> layout in
    which ops must read these parameters; R stands for R or R+.
    """
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    request = request_of(cluster, precision=precision, micro_batches=micro_batches, compiled=compiled)
    watch, inputs = Stopwatch(), {"input_ids": ids, "labels": ids}
    traced = trace_for(model, inputs, None, request, watch)
    prepared = prepare(model, traced, request, watch)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    memory = memory_on(cluster, traced.graph, parameters, request.precision, "adamw", micro_batches)
    restricted = restrict(_using(prepared.strategies, memory, used_as or {}), memory, constraints, cluster.axis_names)
    repeats = repeats_under(traced.graph, restricted.marks, prepared.repeats)
    program = Model(build_problem(memory, restricted, cluster, repeats, recompute=False))
    solution = read_solution(program, run(program, "highs", 60.0, 1e-3))
    chosen, stored = solution.chosen, solution.parameters
    segments = [segment for path in recomputed for segment in _segment(memory, path)]
    step, _, _ = predict(memory, cluster, chosen, stored, segments, repeats)
    moved = announced(memory, cluster, chosen, stored, segments, memory.grouping(repeats)).collectives
    passes = [seconds_of(memory, node, strategy, cluster) for node, strategy in chosen.items()]
    phases = {
        phase: sum(c.seconds for c in moved if c.phase == phase) / micro_batches for phase in ("forward", "backward")
    }
    return Priced(
        step,
        sum(f for f, _ in passes) + phases["forward"],
        sum(b for _, b in passes) + phases["backward"] + step.recompute_seconds / micro_batches,
    )


def _using(strategies: Strategies, memory: StepMemory, used_as: Mapping[str, str]) -> Strategies:
    """The strategies in which ops read parameters in the layouts of `used_as`."""
    found = dict(strategies)
    for node, options in strategies.items():
        for i, ref in enumerate(memory.inputs[node]):
            for pattern, text in used_as.items():
                if memory.is_parameter(ref.node) and fnmatchcase(str(ref.node.target), pattern):
                    wanted = Layout.parse(text).value()
                    options = [s for s in options if s.inputs[i].value() == wanted]
        found[node] = options
    return found


def _segment(memory: StepMemory, path: str) -> list[Segment]:
    inside = [
        i
        for i, node in enumerate(memory.graph.nodes)
        if node.op.startswith("call") and any(scope == path for scope, _ in node.meta.get(SCOPE, ()))
    ]
    return [Segment(inside[0], inside[-1], path)] if inside else []
