"""A plan as plain text: layouts by layer, predicted cost, and the certificate."""

from __future__ import annotations

import math
from collections import defaultdict

from autopar.plans import Plan
from autopar.report.figures import (
    CollectiveSum,
    all_notes,
    collective_sums,
    flops_per_device_second,
    limit_bytes,
    peak_moment,
    recomputed_names,
    replay_text,
    step_parts,
)
from autopar.report.layers import MEANING, labelled, layout_tree, meaning_of, parameter_tree, show_shape
from autopar.report.tables import (
    shorten,
    show_amount,
    show_seconds,
    show_share,
    table,
    wrap,
)
from autopar.sizes import show_bytes, show_bytes_up

_WORDS_LEGEND = "; the word after it names the index that is sharded"


def explain(plan: Plan) -> str:
    """The whole report, at most 100 columns wide, without colour."""
    parts = [_summary(plan), _layers(plan), _parameters(plan), _collectives(plan), _memory(plan), _recompute(plan)]
    parts += [_step(plan), _comparison(plan), _tradeoff(plan), _search(plan), _notes(plan)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def one_line(plan: Plan) -> str:
    """The `repr` of a plan."""
    p, nodes = plan.predicted, f"{len(plan.nodes):,} ops"
    parts = [_mesh(plan), nodes, *([_micro_batches(plan.micro_batches)] if plan.micro_batches > 1 else [])]
    parts += [f"{show_seconds(p.step_seconds)} a step", f"{show_bytes(p.peak_bytes)} at the peak"]
    return f"<Plan: {', '.join(parts)}, gap {100 * plan.certificate.gap:.2f} %>"


def _mesh(plan: Plan) -> str:
    return " x ".join(f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True))


def _summary(plan: Plan) -> list[str]:
    devices = math.prod(plan.mesh_shape)
    device = plan.cluster.get("device", {}).get("name", "")
    predicted, budget, limit = plan.predicted, plan.memory_budget_bytes, limit_bytes(plan)
    at_most = f"a budget of {show_bytes(budget)}" if budget else f"{show_bytes(limit or 0)} usable"
    of_limit = f", of {at_most} ({show_share(predicted.peak_bytes, limit)})" if limit else ""
    rows = [
        ["mesh", f"{_mesh(plan)} ({devices} device{'s' * (devices > 1)}{f', {device}' if device else ''})"],
        ["step", f"{show_seconds(predicted.step_seconds)} predicted"],
        ["memory", f"{show_bytes(predicted.peak_bytes)} per device at the peak{of_limit}"],
        ["training", f"{plan.optimizer}, {_micro_batches(plan.micro_batches)}, {plan.inputs} inputs"],
        ["precision", _precision(plan)],
        ["problem", f"{plan.size.ops:,} ops -> {plan.size.decisions:,} decisions"],
        ["certificate", _certificate(plan)],
    ]
    if plan.constraints:
        rows.append(["constraints", ", ".join(plan.constraints)])
    return ["Plan", *table([[name, shorten(text, 85)] for name, text in rows], "<<")]


_PRECISION = {"parameter": "parameters", "compute": "compute", "reduction": "reductions", "master": "master weights"}


def _precision(plan: Plan) -> str:
    """Each dtype with the tensors that have it: "parameters float32, compute and reductions bfloat16"."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for kind, dtype in plan.precision.items():
        if dtype:
            kinds[dtype.removeprefix("torch.")].append(_PRECISION[kind])
    if len(kinds) < 2:
        return next(iter(kinds), "dtypes of the model")
    return ", ".join(f"{' and '.join(names)} {dtype}" for dtype, names in kinds.items())


def _micro_batches(number: int) -> str:
    return "1 micro-batch" if number == 1 else f"{number} micro-batches"


def _certificate(plan: Plan) -> str:
    proof = plan.certificate
    return (
        f"{proof.status} ({proof.solver}), gap {100 * proof.gap:.2f} %: objective {show_seconds(proof.objective)}, "
        f"bound {show_seconds(proof.bound)} (equal blocks alike)"
    )


def _layers(plan: Plan) -> list[str]:
    lines = layout_tree(plan)
    if not lines:
        return []
    body, used, worded = [], set(), False
    for line in lines:
        margin = "  " * line.depth
        if line.row is None:
            body.append([margin + line.label, *[""] * (1 + len(plan.axis_names))])
            continue
        placements = line.row.layout.placements
        used |= {meaning_of(p) for p in placements}
        worded = worded or any(line.row.factors)
        cells = [f"{p} {word}".strip() for p, word in zip(placements, line.row.factors, strict=True)]
        body.append([margin + labelled(line.label, line.row.names), show_shape(line.row.shape), *cells])
    head = ["Layouts of op outputs by layer", "global shape", *plan.axis_names]
    text = table(body, "<>" + "<" * len(plan.axis_names), head=head, indent=0)
    legend = "; ".join(words for key, words in MEANING.items() if key in used)
    legend += _WORDS_LEGEND if worded else ""
    return [*text, *wrap(f"({legend})", "", " ")]


def _parameters(plan: Plan) -> list[str]:
    if not plan.parameters:
        return []
    body, lines = [], parameter_tree(plan)
    for line in lines:
        row = line.row
        name = ".".join(part for part in (line.label, row.name if row else "") if part)
        cells = [""] * (3 + len(plan.axis_names))
        if row:
            cells = [show_shape(row.shape), row.dtype, *map(str, row.storage.placements), row.moved or "nothing"]
        body.append(["  " * line.depth + name, *cells])
    head = ["Parameters as stored", "shape", "dtype", *plan.axis_names, "moved in a step by"]
    legend = ["(nothing: it is used as stored, and its gradient is computed in the same layout)"]
    unmoved = any(line.row and not line.row.moved for line in lines)
    return table(body, "<><" + "<" * len(plan.axis_names) + "<", head=head, indent=0) + (legend if unmoved else [])


def _collectives(plan: Plan) -> list[str]:
    sums = collective_sums(plan)
    if not sums:
        return ["Collectives", "  none"]
    rows = [
        [s.kind, s.phase, s.axis, f"{s.calls:,}", show_bytes(s.bytes), show_seconds(s.seconds), _causes(s)]
        for s in sums
    ]
    calls, count, seconds = (sum(getattr(s, name) for s in sums) for name in ("calls", "bytes", "seconds"))
    total = ["total", "", "", f"{calls:,}", show_bytes(count), show_seconds(seconds), ""]
    head = ["kind", "phase", "axis", "calls", "input bytes", "seconds", "for"]
    return [
        "Collectives of a step, per device",
        *table([*rows, total] if len(rows) > 1 else rows, "<<<>>><", head=head),
    ]


def _causes(collectives: CollectiveSum) -> str:
    """The two causes with the most bytes, with their shares."""
    parts = [
        cause if count == collectives.bytes else f"{cause} {100 * count / collectives.bytes:.0f} %"
        for cause, count in collectives.causes[:2]
    ]
    return ", ".join(parts)


def _memory(plan: Plan) -> list[str]:
    predicted, peak = plan.predicted, peak_moment(plan)
    rows = [
        [kind, show_bytes(count), show_share(count, predicted.peak_bytes)]
        for kind, count in sorted(predicted.parts.items(), key=lambda item: -item[1])
        if count
    ]
    rows.append(["total", show_bytes(predicted.peak_bytes), ""])
    budget = plan.memory_budget_bytes
    if budget:
        rows.append(["budget", show_bytes(budget), f"{show_bytes(budget - predicted.peak_bytes)} free"])
    title = f"Memory per device at the peak{f', {peak.name}' if peak else ''}"
    return [title, *table(rows, "<><")]


def _recompute(plan: Plan) -> list[str]:
    if not plan.recompute:
        return ["Recomputed in backward", "  nothing: every activation is kept"]
    lines = [f"  {name}: {_segments(count)}" for name, count in recomputed_names(plan.recompute)]
    return ["Recomputed in backward", *lines, f"  in total, {replay_text(plan)}"]


def _segments(number: int) -> str:
    return "1 segment" if number == 1 else f"{number} segments"


def _step(plan: Plan) -> list[str]:
    p = plan.predicted
    rows = [
        [name, show_seconds(seconds), show_share(seconds, p.step_seconds)] for name, seconds in step_parts(p).items()
    ]
    rows.append(["step", show_seconds(p.step_seconds), ""])
    lines = ["Predicted seconds of a step", *table(rows, "<>>")]
    if p.step_seconds and p.flops:
        lines.append(
            f"  {show_amount(p.flops, 'FLOP')} a step (model FLOPs, forward and backward): "
            f"{show_amount(flops_per_device_second(plan), 'FLOP/s')} per device"
        )
    return lines


def _comparison(plan: Plan) -> list[str]:
    if not plan.comparison:
        return []
    return ["Comparison with known schemes, on the same cluster", *comparison_table(plan)]


def _tradeoff(plan: Plan) -> list[str]:
    return ["Under other budgets", *tradeoff_table(plan)] if plan.tradeoff else []


def tradeoff_table(plan: Plan) -> list[str]:
    """The table of seconds by budget; empty if no other budget was planned."""
    own = plan.predicted.step_seconds
    rows = [
        [
            show_bytes_up(p.budget_bytes),
            show_seconds(p.step_seconds),
            show_seconds(p.recompute_seconds),
            f"{p.step_seconds / own:.2f}x" if own else "",
        ]
        for p in plan.tradeoff
    ]
    return table(rows, ">>>>", head=["budget", "step", "recompute", "ratio"]) if rows else []


_LONGEST_NAME = 18  # characters of a scheme's name, so that its figures fit beside it


def comparison_table(plan: Plan) -> list[str]:
    """The table of the plan and its alternatives; one that does not fit has its fastest plan without a budget."""
    own = plan.predicted
    moved = sum(c.bytes * c.count for c in plan.collectives)
    entries = [("this plan", own, moved, "fits", "")]
    for a in plan.comparison:
        needs = f"needs {show_bytes_up(a.smallest_budget_bytes)}" if a.smallest_budget_bytes else "no plan"
        entries.append((a.name, a.predicted, a.comm_bytes, "fits" if a.fits else needs, a.note))  # type: ignore[arg-type]
    rows, notes = [], []
    for full, p, moved, fits, note in entries:
        name = shorten(full, _LONGEST_NAME)
        if note or name != full:
            notes += wrap(f"{name}: {'; '.join(filter(None, [full if name != full else '', note]))}", "  ", "    ")
        if p is None:
            rows.append([name, "", "", "", "", "", "", "", fits])
            continue
        times = f"{p.step_seconds / own.step_seconds:.2f}x" if own.step_seconds else ""
        seconds = [show_seconds(t) for t in (p.step_seconds, p.compute_seconds, p.recompute_seconds, p.comm_seconds)]
        rows.append([name, seconds[0], times, *seconds[1:], show_bytes(moved), show_bytes(p.peak_bytes), fits])
    head = ["", "step", "ratio", "compute", "recompute", "collectives", "input bytes", "peak", "memory"]
    return [*table(rows, "<>>>>>>><", head=head), *notes]


def _search(plan: Plan) -> list[str]:
    size = plan.size
    lines = [f"Solved with {size.variables:,} variables and {size.rows:,} rows for {size.decisions:,} decisions"]
    if plan.planning_seconds:
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in plan.planning_seconds.items())
        total = sum(plan.planning_seconds.values())
        lines += wrap(f"planning took {total:.2f} CPU seconds: {stages}", "  ", "    ")
    return lines


def _notes(plan: Plan) -> list[str]:
    lines = [line for note in all_notes(plan) for line in wrap(note, "  - ", "    ")]
    return ["Notes", *lines] if lines else []
