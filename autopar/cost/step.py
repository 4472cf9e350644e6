"""The predicted cost of one optimizer step under a plan: seconds, collectives and bytes, by walking over the graph.

The prediction does not depend on how the plan was found, so that the solver's objective and peak are checked against
it.

Seconds: the sum of every op's forward and backward, all collectives and the replays of recomputed segments, times
`micro_batches`, less what hides behind compute (`cost.overlap`); then the optimizer's step, bound by memory traffic.

Bytes: `cost.memory.moments`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from autopar.cluster import Cluster
from autopar.cost.gradients import gradient_seconds
from autopar.cost.memory.formulas import StepMemory
from autopar.cost.memory.moments import moments_of
from autopar.cost.memory.optimizer_step import update_seconds
from autopar.cost.memory.planned_bytes import PlannedBytes
from autopar.cost.overlap import hidden_seconds
from autopar.cost.seconds import node_seconds
from autopar.cost.structure.blocks import Repeat
from autopar.cost.traffic import announced, computed_end, in_segment
from autopar.graph import COST
from autopar.plans import Bucket, Collective, ParameterPlan, Prediction, Segment

if TYPE_CHECKING:
    from autopar.strategies.strategy import Strategy

Chosen = Mapping[fx.Node, "Strategy"]


def predict(
    memory: StepMemory,
    cluster: Cluster,
    chosen: Chosen,
    parameters: Mapping[str, ParameterPlan],
    segments: Sequence[Segment],
    repeats: Sequence[Repeat],
) -> tuple[Prediction, tuple[Collective, ...], tuple[Bucket, ...]]:
    """Predict one step. `chosen` has a strategy for every node with tensors; `repeats` are the graph's blocks."""
    grouping = memory.grouping(repeats)
    plan = PlannedBytes(memory, chosen, parameters, segments, repeats, grouping)
    micro_batches = memory.micro_batches
    compute = optimizer = 0.0
    flops = 0
    regions: list[_Region] = []
    before, behind = [0.0] * len(grouping.stretches), [0.0] * len(grouping.stretches)
    for i, members in enumerate(plan.members):  # equal blocks cost the same, so that one of them is evaluated
        model = plan.model(i)
        regions.append(_region(memory, cluster, chosen, parameters, members) if model == i else regions[model])
        for forward, backward in regions[i].running:
            compute += micro_batches * (forward + backward)
            before[grouping.stretch_of(i)] += forward
            behind[grouping.stretch_of(i)] += backward
        for update in regions[i].updates:
            optimizer += update
        flops += micro_batches * regions[i].flops
    recompute = _replay_seconds(plan, segments, regions) if segments else 0.0
    traffic = announced(memory, cluster, chosen, parameters, segments, grouping, plan)
    hidden = hidden_seconds(grouping.stretches, traffic.movable, before, behind, micro_batches, cluster.device.overlap)
    communication = sum(c.seconds for c in traffic.collectives if c.phase != "replay")
    recompute += sum(c.seconds for c in traffic.collectives if c.phase == "replay")
    moments = moments_of(plan)
    peak = max(moments, key=lambda m: m.total_bytes)
    prediction = Prediction(
        step_seconds=compute + communication + recompute + optimizer - hidden,
        compute_seconds=compute,
        comm_seconds=communication,
        recompute_seconds=recompute,
        optimizer_seconds=optimizer,
        peak_bytes=peak.total_bytes,
        parts=peak.parts,
        moments=moments,
        flops=flops,
        hidden_seconds=hidden,
    )
    return prediction, traffic.collectives, traffic.buckets


def _replay_seconds(plan: PlannedBytes, segments: Sequence[Segment], regions: Sequence[_Region]) -> float:
    """Seconds that replays compute in a step."""
    pairs = (zip(row, region.ops, strict=True) for row, region in zip(plan.members, regions, strict=True))
    seconds = dict(itertools.chain.from_iterable(pairs))
    total = 0.0
    for segment in segments:
        inside = plan.nodes[segment.first : segment.last + 1]
        computed = [node for node in inside[: computed_end(plan.memory, inside)] if in_segment(node)]
        total += plan.memory.micro_batches * sum(seconds[node][0] for node in computed if node in seconds)
    return total


class _Region(NamedTuple):
    """The cost of a region's nodes. `ops`: forward and backward seconds of each; `running`: the same without nodes that
    take none; `updates`: seconds of the optimizer's step for each parameter; `flops`: of a micro-batch."""

    ops: Sequence[tuple[float, float]]
    running: Sequence[tuple[float, float]]
    updates: Sequence[float]
    flops: int


def _region(
    memory: StepMemory,
    cluster: Cluster,
    chosen: Chosen,
    parameters: Mapping[str, ParameterPlan],
    members: Sequence[fx.Node],
) -> _Region:
    ops, updates, flops = [], [], 0
    for node in members:
        forward, backward = seconds_of(memory, node, chosen[node], cluster)
        ops.append((forward, backward if memory.train else 0.0))
        cost = node.meta.get(COST)
        flops += cost.flops_forward + (cost.flops_backward if memory.train else 0) if cost else 0
        if memory.is_parameter(node):
            updates.append(update_seconds(memory, node, parameters[str(node.target)].storage, cluster.device))
    return _Region(ops, [of_op for of_op in ops if any(of_op)], updates, flops)


def seconds_of(memory: StepMemory, node: fx.Node, strategy: Strategy, cluster: Cluster) -> tuple[float, float]:
    """Forward and backward seconds of one op in a micro-batch; backward includes what its parameters' gradients
    take."""
    if not in_segment(node) or COST not in node.meta:
        return 0.0, 0.0  # inputs, parameters and the output run nothing
    forward, backward = node_seconds(node, strategy, cluster.device, cluster.shape)
    return forward, backward + gradient_seconds(memory, node, strategy, cluster.device)
