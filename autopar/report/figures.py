"""The figures that all reports of a plan share: sums over collectives, memory, recompute and seconds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.hardware.devices import usable_bytes
from autopar.plans import Alternative, Moment, Plan, Prediction, Segment
from autopar.report.folding import ranges
from autopar.report.tables import show_seconds
from autopar.sizes import show_bytes


@dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind, phase and axis in a step; `bytes`: the sum of their inputs on one device.

    `causes`: (cause, bytes) pairs, largest first; the collectives of all parameters are one cause.
    """

    kind: str
    phase: str
    axis: str
    calls: int
    bytes: int
    seconds: float
    causes: tuple[tuple[str, int], ...]


def collective_sums(plan: Plan) -> list[CollectiveSum]:
    """The plan's collectives grouped by kind, phase and axis; the group with the most seconds first."""
    groups: defaultdict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for c in plan.collectives:
        groups[c.kind, c.phase, plan.axis_names[c.axis]].append(c)
    sums = []
    for key, members in groups.items():
        causes = Counter[str]()
        for c in members:
            causes["parameters" if plan.served(c) else c.cause] += c.bytes * c.count
        calls = sum(c.count for c in members)
        sums.append(
            CollectiveSum(*key, calls, causes.total(), sum(c.seconds for c in members), tuple(causes.most_common()))
        )
    return sorted(sums, key=lambda s: -s.seconds)


def step_parts(predicted: Prediction) -> dict[str, float]:
    """Seconds of a step by part. "hidden", a negative number, is communication that overlaps with compute."""
    parts = {
        "compute": predicted.compute_seconds,
        "recompute": predicted.recompute_seconds,
        "communication": predicted.comm_seconds,
        "optimizer": predicted.optimizer_seconds,
    }
    hidden = predicted.step_seconds - sum(parts.values())
    if abs(hidden) > 1e-6 * predicted.step_seconds:
        parts["hidden"] = hidden
    return parts


def busy_parts(predicted: Prediction, replayed_seconds: float = 0.0) -> dict[str, float]:
    """Seconds of a step by part without hidden communication, so that no part is negative and all add up to the step.

    `replayed_seconds`: the seconds of recompute that are collectives; they count as communication. If that is not
    given, and more is hidden than communication takes, the rest is subtracted from recompute.
    """
    parts = step_parts(predicted)
    hidden = max(-parts.pop("hidden", 0.0), 0.0)
    parts["recompute"] -= replayed_seconds
    parts["communication"] += replayed_seconds
    for name in ("communication", "recompute"):
        hidden_part = min(hidden, parts[name])
        parts[name], hidden = parts[name] - hidden_part, hidden - hidden_part
    return parts


def replayed_seconds(plan: Plan) -> float:
    """The part of the seconds of recompute that is collectives."""
    return min(sum(c.seconds for c in plan.collectives if c.phase == "replay"), plan.predicted.recompute_seconds)


def replay_text(plan: Plan) -> str:
    """How many ops are recomputed, and how long that takes, in words."""
    return f"{recomputed_ops(plan):,} of {len(plan.nodes):,} ops run again: {replay_cost(plan)}"


def replay_cost(plan: Plan) -> str:
    """The seconds of a step that recompute takes, in words."""
    collectives = replayed_seconds(plan)
    own = show_seconds(plan.predicted.recompute_seconds - collectives)
    return f"{own} a step{f', plus {show_seconds(collectives)} of repeated collectives' if collectives else ''}"


def limit_bytes(plan: Plan) -> int | None:
    """The limit for the peak: the plan's budget, else the usable memory of its device; None if neither is known."""
    device = plan.cluster.get("device", {})
    if plan.memory_budget_bytes or not device.get("memory_bytes"):
        return plan.memory_budget_bytes
    return usable_bytes(device.get("kind", "cpu"), device["memory_bytes"])


def peak_moment(plan: Plan) -> Moment | None:
    return max(plan.predicted.moments, key=lambda moment: moment.total_bytes, default=None)


def recomputed_names(segments: Sequence[Segment]) -> list[tuple[str, int]]:
    """Names of recomputed segments, and how many; numbered siblings are merged: ("transformer.h.{0-5}", 6)."""
    numbered: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    names: list[tuple[str, int]] = []
    for segment in segments:
        parts = segment.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            names.append((segment.name, 1))
        else:
            numbered[".".join(parts[:at]), ".".join(["", *parts[at + 1 :]])].append(int(parts[at]))
    for (head, tail), indices in numbered.items():
        names.append((f"{head}.{ranges(indices)}{tail}".lstrip("."), len(indices)))
    return names


def recomputed_ops(plan: Plan) -> int:
    return sum(1 for n in plan.nodes for s in plan.recompute if s.first <= n.position <= s.last)


def all_notes(plan: Plan) -> tuple[str, ...]:
    """The planner's notes, those about the device, and one for each mesh axis over which nothing is sharded."""
    idle = (
        f"nothing is split over {name}: its {size} devices all do the same work. A split would take longer than it "
        f"saves, or the dims that could be split, such as the batch, do not divide by {size}"
        for axis, (name, size) in enumerate(zip(plan.axis_names, plan.mesh_shape, strict=True))
        if size > 1 and _is_idle(plan, axis)
    )
    return (*plan.notes, *device_notes(plan), *idle)


def device_notes(plan: Plan) -> tuple[str, ...]:
    """Notes if the peak exceeds the device's memory (the budget allowed it), or if its compute dtype is slow."""
    device, notes = plan.cluster.get("device", {}), []
    name, memory_bytes, peak = device.get("name", ""), device.get("memory_bytes"), plan.predicted.peak_bytes
    if memory_bytes is not None and peak > memory_bytes:
        notes.append(f"the peak of {show_bytes(peak)} is more than the {show_bytes(memory_bytes)} that one {name} has")
    rates, compute = device.get("flops_per_s", {}), plan.precision.get("compute") or ""
    halves = {"bfloat16": ("float16", "fp16"), "float16": ("bfloat16", "bf16")}
    if compute in halves and rates:
        other, option = halves[compute]
        own, others = (rates.get(dtype, rates["float32"]) for dtype in (compute, other))
        if own <= rates["float32"] < others:
            notes.append(
                f"{name} has no fast {compute} matrix products: {own / 1e12:.3g} TFLOP/s, against "
                f'{others / 1e12:.3g} TFLOP/s in {other} (precision="{option}")'
            )
    return tuple(notes)


def _is_idle(plan: Plan, axis: int) -> bool:
    layouts = [parameter.storage for parameter in plan.parameters]
    layouts += [layout for node in plan.nodes for layout in node.outputs]
    return bool(layouts) and all(layout.placements[axis].is_replicated for layout in layouts)


def flops_per_device_second(plan: Plan) -> float:
    """Model FLOPs per device and second of the step; 0 if the plan has no step time."""
    p = plan.predicted
    return p.flops / math.prod(plan.mesh_shape) / p.step_seconds if p.step_seconds else 0.0


def summary(plan: Plan) -> dict[str, Any]:
    """The figures of `explain` as JSON values: seconds, bytes and counts of one device and one step."""
    predicted, peak = plan.predicted, peak_moment(plan)
    return {
        "mesh": dict(zip(plan.axis_names, plan.mesh_shape, strict=True)),
        "devices": math.prod(plan.mesh_shape),
        "device": plan.cluster.get("device", {}).get("name", ""),
        "training": {
            "optimizer": plan.optimizer,
            "precision": dict(plan.precision),
            "micro_batches": plan.micro_batches,
            "inputs": plan.inputs,
            "constraints": list(plan.constraints),
        },
        "step_seconds": predicted.step_seconds,
        "step_seconds_by_part": step_parts(predicted),
        "flops": predicted.flops,
        "flops_per_device_second": flops_per_device_second(plan),
        "peak_bytes": predicted.peak_bytes,
        "peak_bytes_by_part": dict(predicted.parts),
        "peak_moment": peak.name if peak else "",
        "memory_budget_bytes": plan.memory_budget_bytes,
        "limit_bytes": limit_bytes(plan),
        "collectives": [{**vars(s), "causes": dict(s.causes)} for s in collective_sums(plan)],
        "recompute": [{"name": name, "segments": count} for name, count in recomputed_names(plan.recompute)],
        "recomputed_ops": recomputed_ops(plan),
        "certificate": dict(vars(plan.certificate)),
        "problem": dict(vars(plan.size)),
        "planning_cpu_seconds": dict(plan.planning_seconds),
        "comparison": [alternative_figures(a) for a in plan.comparison],
        "tradeoff": [dict(vars(point)) for point in plan.tradeoff],
        "notes": list(all_notes(plan)),
    }


def alternative_figures(alternative: Alternative) -> dict[str, Any]:
    """The figures of an alternative; None for those that it lacks because it has no plan."""
    p = alternative.predicted
    return {
        "name": alternative.name,
        "fits": alternative.fits,
        "step_seconds": p.step_seconds if p else None,
        "step_seconds_by_part": step_parts(p) if p else None,
        "peak_bytes": p.peak_bytes if p else None,
        "comm_bytes": alternative.comm_bytes if p else None,
        "smallest_budget_bytes": alternative.smallest_budget_bytes,
        "budget_lower_bound_bytes": alternative.budget_lower_bound_bytes,
        "note": alternative.note,
    }
