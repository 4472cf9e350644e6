"""A plan as plain text: what it does layer by layer, what that costs, and why to believe it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.layout import Layout
from autopar.plans import NodePlan, ParameterPlan, Plan
from autopar.report.folding import fold, ranges
from autopar.report.tables import shorten, show_seconds, show_share, significant, table, wrap
from autopar.sizes import show_bytes

_MEANING = {
    "R": "R whole on every rank",
    "R+": "R+ whole, its gradient a partial sum",
    "S": "Sd sharded on dim d",
    "@": "Sd@n on dim d, inside n outer parts",
    "P": "P partial sum",
}
_PARAMETER = "parameter "  # how a collective's cause begins that serves a parameter and its gradient
# Ops that only look at a tensor in another way: their layouts follow from their input's.
_VIEWS = {
    *("getitem", "view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("transpose", "t", "permute", "movedim", "swapaxes", "split", "chunk", "narrow", "select"),
    *("contiguous", "clone", "detach", "to", "size"),
}


def explain(plan: Plan) -> str:
    """The whole report, at most 100 columns wide, without colour."""
    parts = [_summary(plan), _layers(plan), _parameters(plan), _collectives(plan), _memory(plan), _recompute(plan)]
    parts += [_step(plan), _search(plan), _notes(plan)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _summary(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))
    devices = math.prod(plan.mesh_shape)
    device = plan.cluster.get("device", {}).get("name", "")
    predicted, budget = plan.predicted, plan.memory_budget_bytes
    limit = budget or plan.cluster.get("device", {}).get("memory_bytes")
    of_budget = (
        f"of {show_bytes(limit)}{'' if budget else ' that a device has'} ({show_share(predicted.peak_bytes, limit)})"
        if limit
        else ""
    )
    rows = [
        ["mesh", f"{mesh} ({devices} devices{f', {device}' if device else ''})"],
        ["step", f"{show_seconds(predicted.step_seconds)} predicted"],
        ["memory", f"{show_bytes(predicted.peak_bytes)} {of_budget} at the peak, per device"],
        [
            "training",
            f"{plan.optimizer}, {_precision(plan)}, {_micro_batches(plan.micro_batches)}, {plan.inputs} inputs",
        ],
        ["problem", f"{plan.size.ops:,} ops -> {plan.size.decisions:,} decisions"],
        ["certificate", _certificate(plan)],
    ]
    if plan.constraints:
        rows.append(["constraints", ", ".join(plan.constraints)])
    return ["Plan", *table([[name, shorten(text, 85)] for name, text in rows], "<<")]


def _precision(plan: Plan) -> str:
    """Dtypes with what has them: "float32 parameter, bfloat16 compute+reduction"."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for kind, dtype in plan.precision.items():
        if dtype:
            kinds[dtype.removeprefix("torch.")].append(kind)
    if len(kinds) < 2:
        return next(iter(kinds), "dtypes of the model")
    return ", ".join(f"{dtype} {'+'.join(names)}" for dtype, names in kinds.items())


def _micro_batches(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"


def _certificate(plan: Plan) -> str:
    proof = plan.certificate
    return (
        f"{proof.status}, {proof.solver}: objective {show_seconds(proof.objective)}, no plan is below "
        f"{show_seconds(proof.bound)} (gap {100 * proof.gap:.2f} %)"
    )


@dataclass(frozen=True)
class _Ops:
    """What the table of layouts tells of neighbouring ops that lie alike; shape and factors are the last one's."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    factors: tuple[str, ...]

    def join(self, after: _Ops) -> _Ops | None:
        if self.layout != after.layout or len(self.shape) != len(after.shape):
            return None
        names = self.names if self.names[-1] == after.names[-1] else self.names + after.names
        return replace(after, names=names)


def _layers(plan: Plan) -> list[str]:
    rows = [(node.scope, ops) for node in plan.nodes for ops in _ops(node)]
    if not rows:
        return []
    body, used = [], set()
    for line in fold(rows, _Ops.join):
        margin = "  " * line.depth
        if line.row is None:
            body.append([margin + line.label, *[""] * (1 + len(plan.axis_names))])
            continue
        placements = [str(p) for p in line.row.layout.placements]
        used |= {_legend_key(p) for p in placements}
        cells = [_cell(p, f) for p, f in zip(placements, _padded(line.row.factors, line.row.layout), strict=True)]
        body.append([margin + _labelled(line.label, line.row.names), _shape(line.row.shape), *cells])
    head = ["Layouts of results by layer", "global shape", *plan.axis_names]
    lines = table(body, "<>" + "<" * len(plan.axis_names), head=head, indent=0)
    legend = "; ".join(text for key, text in _MEANING.items() if key in used)
    return [*lines, *wrap(f"({legend}; a name behind it is the rule's factor that the axis shards)", "", " ")]


def _ops(node: NodePlan) -> Iterable[_Ops]:
    """One row for an op that computes a tensor from tensors; views, inputs and parameters are left out."""
    name = node.target.rpartition(".")[2].strip("_")
    if node.inputs and node.outputs and name not in _VIEWS:
        yield _Ops((name,), node.shapes[0], node.outputs[0], node.factors)


def _labelled(label: str, names: Sequence[str]) -> str:
    """A module and its ops, the middle of a long list left out."""
    text = ", ".join(names) if len(names) <= 4 else ", ".join([*names[:2], f"… {len(names) - 3} more …", names[-1]])
    return f"{label} · {text}" if label else f"· {text}"


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _legend_key(placement: str) -> str:
    return "@" if "@" in placement else placement[0] if placement[0] in "SP" else placement


def _cell(placement: str, factor: str) -> str:
    """A placement, and the factor's name where the rule gives it a word."""
    return f"{placement} {factor}" if factor.isalpha() and factor != placement else placement


def _padded(factors: tuple[str, ...], layout: Layout) -> tuple[str, ...]:
    return factors if len(factors) == len(layout) else ("",) * len(layout)


def _parameters(plan: Plan) -> list[str]:
    if not plan.parameters:
        return []
    moved: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for c in sorted(plan.collectives, key=lambda c: c.axis):
        axes = moved[c.cause.removeprefix(_PARAMETER)].setdefault(c.kind.replace("_", "-"), [])
        if plan.axis_names[c.axis] not in axes:
            axes.append(plan.axis_names[c.axis])

    def cells(p: ParameterPlan) -> tuple[str, ...]:
        kinds = {kind: f"{kind} {'+'.join(axes)}" for kind, axes in sorted(moved[p.name].items())}
        if p.regather and "all-gather" in kinds:
            kinds["all-gather"] += " twice"
        dtype = p.dtype.removeprefix("torch.") + ("" if p.trainable else ", frozen")
        return (
            p.name.rpartition(".")[2],
            _shape(p.shape),
            dtype,
            *map(str, p.storage.placements),
            ", ".join(kinds.values()),
        )

    body = []
    for line in fold([(p.name.rpartition(".")[0], cells(p)) for p in plan.parameters]):
        name = ".".join(part for part in (line.label, line.row[0] if line.row else "") if part)
        body.append(["  " * line.depth + name, *(line.row[1:] if line.row else [""] * (3 + len(plan.axis_names)))])
    head = ["Parameters as stored", "shape", "dtype", *plan.axis_names, "moved in a step by"]
    return table(body, "<><" + "<" * len(plan.axis_names) + "<", head=head, indent=0)


def _collectives(plan: Plan) -> list[str]:
    if not plan.collectives:
        return ["Collectives", "  none"]
    calls: Counter[tuple[str, str, str]] = Counter()
    volume: Counter[tuple[str, str, str]] = Counter()
    seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    causes: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for c in plan.collectives:
        key = (c.kind, c.phase, plan.axis_names[c.axis])
        calls[key] += c.count
        volume[key] += c.bytes * c.count
        seconds[key] += c.seconds
        causes[key][c.cause] += c.bytes * c.count
    rows = [
        [*key, f"{calls[key]:,}", show_bytes(volume[key]), show_seconds(seconds[key]), _causes(causes[key])]
        for key in sorted(calls, key=lambda key: -seconds[key])
    ]
    total = ["all", "", "", f"{calls.total():,}", show_bytes(volume.total()), show_seconds(sum(seconds.values())), ""]
    head = ["kind", "phase", "axis", "calls", "bytes in", "seconds", "for"]
    return [
        "Collectives of a step, per device",
        *table([*rows, total] if len(rows) > 1 else rows, "<<<>>><", head=head),
    ]


def _causes(causes: Counter[str]) -> str:
    """What the bytes are moved for: parameters (told one by one above) and the rest, largest first."""
    shown = Counter[str]()
    for cause, count in causes.items():
        shown["parameters" if cause.startswith(_PARAMETER) else cause] += count
    total = shown.total()
    parts = [
        cause if count == total else f"{cause} {100 * count / total:.0f} %" for cause, count in shown.most_common(2)
    ]
    return ", ".join(parts)


def _memory(plan: Plan) -> list[str]:
    predicted = plan.predicted
    peak = max(predicted.moments, key=lambda moment: moment.total_bytes, default=None)
    rows = [
        [kind, show_bytes(count), show_share(count, predicted.peak_bytes)]
        for kind, count in sorted(predicted.parts.items(), key=lambda item: -item[1])
        if count
    ]
    rows.append(["all", show_bytes(predicted.peak_bytes), ""])
    budget = plan.memory_budget_bytes
    if budget:
        rows.append(["budget", show_bytes(budget), f"{show_bytes(budget - predicted.peak_bytes)} free"])
    title = f"Memory per device at the peak{f', {peak.name}' if peak else ''}"
    return [title, *table(rows, "<><")]


def _recompute(plan: Plan) -> list[str]:
    if not plan.recompute:
        return ["Recomputed in backward", "  nothing: every activation is kept"]
    numbered: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    lines: list[str] = []
    for segment in plan.recompute:
        parts = segment.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if at is None:
            lines.append(f"  {segment.name}: {segment.last - segment.first + 1:,} ops")
        else:
            numbered[".".join(parts[:at]), ".".join(["", *parts[at + 1 :]])].append(int(parts[at]))
    for (head, tail), indices in numbered.items():
        lines.append(f"  {head}.{ranges(indices)}{tail}: {_segments(len(indices))}")
    ops = sum(1 for n in plan.nodes for s in plan.recompute if s.first <= n.position <= s.last)
    extra = show_seconds(plan.predicted.recompute_seconds)
    return ["Recomputed in backward", *lines, f"  in all {ops:,} of {len(plan.nodes):,} ops, {extra} a step"]


def _segments(number: int) -> str:
    return "1 segment" if number == 1 else f"{number} segments"


def _step(plan: Plan) -> list[str]:
    p = plan.predicted
    split = {
        "compute": p.compute_seconds,
        "recompute": p.recompute_seconds,
        "communication": p.comm_seconds,
        "optimizer": p.optimizer_seconds,
    }
    rows = [[name, show_seconds(seconds), show_share(seconds, p.step_seconds)] for name, seconds in split.items()]
    rows.append(["step", show_seconds(p.step_seconds), ""])
    lines = ["Predicted seconds of a step", *table(rows, "<>>")]
    if p.step_seconds and p.flops:
        rate = p.flops / math.prod(plan.mesh_shape) / p.step_seconds
        lines.append(
            f"  {significant(p.flops / 1e12)} TFLOP a step (model FLOPs, forward and backward): "
            f"{significant(rate / 1e12)} TFLOP/s per device"
        )
    return lines


def _search(plan: Plan) -> list[str]:
    size = plan.size
    lines = [f"Found with {size.variables:,} variables and {size.rows:,} rows for {size.decisions:,} decisions"]
    if plan.planning_seconds:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in plan.planning_seconds.items())
        total = sum(plan.planning_seconds.values())
        lines += wrap(f"planning took {total:.2f} CPU seconds: {stages}", "  ", "    ")
    return lines


def _notes(plan: Plan) -> list[str]:
    lines = [line for note in plan.notes for line in wrap(note, "  - ", "    ")]
    return ["Notes", *lines] if lines else []
