"""Plans with one feature off, with the step time that they would have on the true cluster. Each feature, when off:

=============  =====================================================================================================
recompute      nothing is recomputed: the pin `recompute:* = never`
joint          two stages: sharding is chosen for speed alone, without a budget; then, with all layouts pinned, what
               is recomputed (and gathered again)
joint-ladder   as joint, with the first stage under several budgets, from none down to the case's; the fastest that fits
overlap-blind  planned as if no communication overlapped with compute, then priced with overlap
overlap        planned and priced without overlap
sharing        every reader of an activation pays for its own conversion. This is the price of the plan with sharing,
               an upper bound: a plan made for that price may be faster
zero           parameters, gradients and optimizer states are whole on every device: `param:* = R`
zero-across    the same along the first axis, between nodes; they may be sharded along the others
one-axis       the devices are a mesh of one axis
micro-batches  one micro-batch. Here, "on" is the fastest of 1, 2 and 4; other features have one both on and off
bias           the addition of a bias is not split from its product
fold           equal blocks do not share their decisions
=============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import transformers
from grid import BASE, NEEDS_TWO_AXES

from autopar import AutoparError, Cluster, InfeasibleError, InputError, Plan
from autopar.cost.collectives import collective_seconds
from autopar.cost.memory.on_cluster import memory_on
from autopar.cost.traffic import conversion_moves, gradient_enters, needs_grad, replay_end
from autopar.graph import tensor_of
from autopar.planning.micro_batches import part
from autopar.planning.simulation import chosen_strategies, predicted_on
from autopar.planning.stages import Prepared, prepare, request_of, trace_for
from autopar.plans import Prediction
from autopar.precision import Precision
from autopar.stopwatch import Stopwatch

NO_RECOMPUTE = "recompute:* = never"
MICRO_BATCHES = (1, 2, 4)
_UNBOUNDED_BYTES = 1 << 60  # a budget that never binds


@dataclass(frozen=True)
class Found:
    """A plan, and the prediction of its step on the true cluster."""

    plan: Plan
    predicted: Prediction

    @staticmethod
    def of(plan: Plan) -> Found:
        return Found(plan, plan.predicted)


@dataclass(frozen=True)
class Case:
    """A graph on a mesh, to be planned under a budget."""

    prepared: Prepared
    inputs: Mapping[str, torch.Tensor]
    preset: str

    def under(self, budget_bytes: int) -> Case:
        """The same graph under another budget."""
        request = replace(self.prepared.request, memory_budget_bytes=budget_bytes)
        return Case(replace(self.prepared, request=request), self.inputs, self.preset)

    @property
    def budget_bytes(self) -> int:
        found = self.prepared.request.memory_budget_bytes
        assert found is not None
        return found

    @cached_property
    def best(self) -> Plan:
        """The plan with every feature on."""
        return self.prepared.solve(memory_budget_bytes=self.budget_bytes)

    def again(self, micro_batches: int, *, bias_split: bool = True) -> Prepared:
        """Trace again, for another number of micro-batches or without splitting biases from products."""
        old, watch = self.prepared, Stopwatch()
        request = replace(old.request, micro_batches=micro_batches)
        examples = part(self.inputs, micro_batches)
        traced = trace_for(old.model, examples, None, request, watch, bias_split=bias_split)
        return prepare(old.model, traced, request, watch)


def case_of(
    model: transformers.PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    mesh: tuple[int, ...],
    preset: str,
    time_limit: float,
) -> Case:
    """A case with bf16 compute and fp32 master weights; `under` sets its budget."""
    request = request_of(Cluster.preset(preset, mesh), None, "bf16", time_limit=time_limit)
    watch = Stopwatch()
    traced = trace_for(model, inputs, None, request, watch)
    return Case(prepare(model, traced, request, watch), inputs, preset)


def _nothing_off(case: Case) -> Found:
    return Found.of(case.best)


def _pinned(*constraints: str) -> Callable[[Case], Found]:
    return lambda case: Found.of(case.prepared.solve(memory_budget_bytes=case.budget_bytes, constraints=constraints))


def _zero_across(case: Case) -> Found:
    axes = len(case.prepared.request.cluster.shape)
    return _pinned(f"param:* = {','.join(['R'] + ['*'] * (axes - 1))}")(case)


def _joint(case: Case) -> Found:
    return _two_stages(case, (_UNBOUNDED_BYTES,))


def _joint_ladder(case: Case) -> Found:
    return _two_stages(case, (_UNBOUNDED_BYTES, 4 * case.budget_bytes, 2 * case.budget_bytes, case.budget_bytes))


def _two_stages(case: Case, first_budgets: tuple[int, ...]) -> Found:
    """For each of these budgets (largest first), choose shardings without recompute, then recompute for the case's
    budget; the fastest plan that fits."""
    prepared, plans, refusal = case.prepared, [], None
    for budget in first_budgets:
        try:
            sharding = prepared.solve(memory_budget_bytes=budget, constraints=(NO_RECOMPUTE,))
        except InfeasibleError as error:  # smaller budgets are infeasible too
            refusal = refusal or error
            break
        chosen = chosen_strategies(prepared, sharding, prepared.request.cluster)
        pinned = replace(prepared, strategies={node: (strategy,) for node, strategy in chosen.items()})
        try:
            plans.append(pinned.solve(memory_budget_bytes=case.budget_bytes))
        except InfeasibleError as error:
            refusal = error
    return _fastest(plans, refusal)


def _fastest(plans: Sequence[Plan], refusal: InfeasibleError | None) -> Found:
    """The fastest of the plans; without any, raises `refusal`."""
    if not plans:
        assert refusal is not None
        raise refusal
    return Found.of(min(plans, key=lambda plan: plan.predicted.step_seconds))


def _without_overlap(case: Case) -> Plan:
    cluster = case.prepared.request.cluster
    blind = replace(cluster, device=replace(cluster.device, overlap=0.0))
    prepared = replace(case.prepared, request=replace(case.prepared.request, cluster=blind))
    return prepared.solve(memory_budget_bytes=case.budget_bytes)


def _overlap(case: Case) -> Found:
    return Found.of(_without_overlap(case))


def _overlap_blind(case: Case) -> Found:
    plan = _without_overlap(case)
    return Found(plan, predicted_on(case.prepared, plan, case.prepared.request.cluster))


def _sharing(case: Case) -> Found:
    more = unshared_seconds(case.prepared, case.best)
    predicted = case.best.predicted
    priced = replace(
        predicted,
        step_seconds=predicted.step_seconds + more,
        comm_seconds=predicted.comm_seconds + more,
    )
    return Found(case.best, priced)


def unshared_seconds(prepared: Prepared, plan: Plan) -> float:
    """Additional seconds of a step if each reader converts an activation for itself, without overlap."""
    cluster, graph = prepared.request.cluster, prepared.traced.graph
    parameters = dict(prepared.model.named_parameters(remove_duplicate=False))
    precision = Precision.from_dict(plan.precision)
    memory = memory_on(cluster, graph, parameters, precision, plan.optimizer, plan.micro_batches)
    chosen, nodes = chosen_strategies(prepared, plan, cluster), list(graph.nodes)
    segment_of, replayed = {}, set()
    for segment in plan.recompute:
        inside = nodes[segment.first : segment.last + 1]
        segment_of.update(dict.fromkeys(inside, segment.first))
        replayed.update(inside[: replay_end(memory, inside)])
    seconds, paid = 0.0, set()
    for node in chosen:
        for ref, wanted in zip(memory.inputs[node], chosen[node].inputs, strict=True):
            if memory.is_parameter(ref.node):
                continue
            grad = needs_grad(memory, ref)
            source = chosen[ref.node].outputs[ref.index]
            source, wanted = (source, wanted) if grad else (source.value(), wanted.value())
            first = (ref, wanted, segment_of.get(node)) not in paid
            paid.add((ref, wanted, segment_of.get(node)))
            if first:
                continue
            forward, backward = conversion_moves(ref, source, wanted, cluster.shape, needs_grad=grad)
            moves = forward * (2 if node in replayed else 1)
            moves += backward if gradient_enters(memory, node, ref) else []
            size = tensor_of(ref).dtype.itemsize
            seconds += sum(collective_seconds(m.kind, m.elements * size, cluster.axes[m.axis]) for m in moves)
    return plan.micro_batches * seconds


def _one_axis(case: Case) -> Found:
    cluster = Cluster.preset(case.preset, (case.prepared.request.cluster.devices,))
    return Found.of(case.prepared.on(cluster).solve(memory_budget_bytes=case.budget_bytes))


def _micro_batches(case: Case) -> Found:
    """The fastest plan of several numbers of micro-batches: the feature on."""
    plans, refusal = [], None
    for count in MICRO_BATCHES:
        try:
            prepared = case.prepared if count == 1 else case.again(count)
            plans.append(prepared.solve(memory_budget_bytes=case.budget_bytes))
        except InfeasibleError as error:
            refusal = error
    return _fastest(plans, refusal)


def _bias(case: Case) -> Found:
    return Found.of(case.again(1, bias_split=False).solve(memory_budget_bytes=case.budget_bytes))


def _fold(case: Case) -> Found:
    return Found.of(case.prepared.solve(memory_budget_bytes=case.budget_bytes, fold=False))


FEATURES: dict[str, Callable[[Case], Found]] = {
    "recompute": _pinned(NO_RECOMPUTE),
    "joint": _joint,
    "joint-ladder": _joint_ladder,
    "overlap-blind": _overlap_blind,
    "overlap": _overlap,
    "sharing": _sharing,
    "zero": _pinned("param:* = R"),
    "zero-across": _zero_across,
    "one-axis": _one_axis,
    "micro-batches": _micro_batches,
    "bias": _bias,
    "fold": _fold,
}
RUNS_ON = ("micro-batches",)
"""Features whose run has the feature on; the base run, with which features are compared, has it off."""


def plan_without(case: Case, feature: str) -> dict[str, Any]:
    """The figures of a run, seconds and bytes of one device; if nothing fits, the smallest budget that would."""
    try:
        found = _nothing_off(case) if feature == BASE else FEATURES[feature](case)
    except InputError:
        raise
    except AutoparError as error:  # nothing fits, or the solver ran out of time
        smallest = error.smallest_budget_bytes if isinstance(error, InfeasibleError) else None
        return {"fits": False, "smallest_budget_bytes": smallest, "note": error.message}
    predicted, plan = found.predicted, found.plan
    return {
        "fits": True,
        "step_seconds": predicted.step_seconds,
        "compute_seconds": predicted.compute_seconds,
        "comm_seconds": predicted.comm_seconds,
        "hidden_seconds": predicted.hidden_seconds,
        "recompute_seconds": predicted.recompute_seconds,
        "optimizer_seconds": predicted.optimizer_seconds,
        "peak_bytes": predicted.peak_bytes,
        "micro_batches": plan.micro_batches,
        "gap": plan.certificate.gap,
        "status": plan.certificate.status,
        "variables": plan.size.variables,
        "planning_seconds": sum(plan.planning_seconds.values()),
    }


assert set(NEEDS_TWO_AXES) < FEATURES.keys()
