"""A plan as one HTML file that opens offline: this module computes the contents, the templates the looks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2

from autopar.layout import Placement
from autopar.plans import Alternative, Plan
from autopar.report import glossary
from autopar.report.colours import COLOURS
from autopar.report.figures import (
    all_notes,
    busy_parts,
    collective_sums,
    flops_per_device_second,
    limit_bytes,
    peak_moment,
    recomputed_names,
    recomputed_ops,
    replay_cost,
    replay_text,
    replayed_seconds,
    step_parts,
)
from autopar.report.folding import Line
from autopar.report.lanes import kinds, lanes
from autopar.report.layers import labelled, layout_tree, parameter_tree, show_shape
from autopar.report.tables import show_amount, show_seconds, show_share
from autopar.report.timeline import curve, timeline
from autopar.sizes import show_bytes, show_bytes_up

_UNFOLDED_LINES = 80  # a tree of fewer lines starts unfolded
_SEGMENTS = 4  # at most so many recomputed segments are named in the answer


@dataclass(frozen=True)
class Chip:
    """A placement over one axis as a small coloured label; `about` explains it in words."""

    text: str
    state: str  # a key of glossary.LAYOUTS
    about: str


@dataclass
class Branch:
    """A line of a tree and the lines below it."""

    label: str
    shape: str = ""
    detail: str = ""
    chips: tuple[Chip, ...] = ()
    repeats: int = 1
    children: list[Branch] = field(default_factory=list)


def page(plan: Plan, title: str = "plan") -> str:
    """The report as HTML."""
    return _environment().get_template("page.html").render(_facts(plan, title))


def snippet(plan: Plan) -> str:
    """The HTML of a plan in a notebook: the answers, two bars, and the folded text report."""
    facts = _facts(plan, "plan")
    seconds = facts["busy"]
    sizes = dict(sorted(plan.predicted.parts.items(), key=lambda item: -item[1]))
    return (
        _environment()
        .get_template("snippet.html")
        .render(
            facts,
            text=plan.explain(),
            hidden=facts["parts"].get("hidden", 0.0),
            seconds_bar=[(name, show_seconds(value), value) for name, value in seconds.items() if value],
            seconds_in_all=sum(seconds.values()) or 1.0,
            bytes_bar=[(name, show_bytes(value), value) for name, value in sizes.items() if value],
            bytes_in_all=max(facts["limit"] or 0, sum(sizes.values())) or 1,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.PackageLoader("autopar.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(bytes=show_bytes, enough=show_bytes_up, seconds=show_seconds, thousands="{:,}".format)
    environment.filters.update(definitions=_definitions)
    environment.globals.update(
        share=show_share, glossary=glossary, show_amount=show_amount, busy_parts=busy_parts, colours=COLOURS
    )
    return environment


def _definitions(names: Iterable[str], words: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, definition) of each name that has a definition, without duplicates."""
    return [(name, words[name]) for name in dict.fromkeys(names) if name in words]


def _facts(plan: Plan, title: str) -> dict[str, Any]:
    layouts, parameters = _layout_branches(plan), _parameter_branches(plan)
    limit, comm_bytes = limit_bytes(plan), sum(c.bytes * c.count for c in plan.collectives)
    own_fits = limit is None or plan.predicted.peak_bytes <= limit
    return {
        "title": title,
        "plan": plan,
        "devices": math.prod(plan.mesh_shape),
        "device": plan.cluster.get("device", {}).get("name", ""),
        "axes": _axes(plan),
        "answers": answers(plan),
        "parts": step_parts(plan.predicted),
        "busy": busy_parts(plan.predicted, replayed_seconds(plan)),
        "flops_rate": flops_per_device_second(plan),
        "sums": collective_sums(plan),
        "notes": all_notes(plan),
        "limit": limit,
        "peak_moment": peak_moment(plan),
        "timeline": timeline(plan),
        "lanes": lanes(plan),
        "lane_kinds": kinds(lanes(plan)),
        "recomputed": recomputed_names(plan.recompute),
        "replay": replay_text(plan),
        "layouts": layouts,
        "parameters": parameters,
        "unfold_layouts": _size(layouts) < _UNFOLDED_LINES,
        "unfold_parameters": _size(parameters) < _UNFOLDED_LINES,
        "longest_seconds": max([plan.predicted.step_seconds, *(_seconds(a) for a in plan.comparison)]),
        "comm_bytes": comm_bytes,
        "curve": curve(plan.tradeoff, 1000, 400) if len(plan.tradeoff) > 1 else (),
        "everything": [Alternative("this plan", own_fits, plan.predicted, comm_bytes), *plan.comparison],
    }


def _seconds(alternative: Alternative) -> float:
    return alternative.predicted.step_seconds if alternative.predicted else 0.0


def _axes(plan: Plan) -> list[dict[str, Any]]:
    """Name and size of each axis and, if the cluster is known, the bandwidth between its devices."""
    links = plan.cluster.get("axes", ())
    rates = [show_amount(link["bytes_per_s"], "B/s") for link in links] if len(links) == len(plan.axis_names) else None
    return [
        {"name": name, "size": size, "rate": rates[i] if rates else ""}
        for i, (name, size) in enumerate(zip(plan.axis_names, plan.mesh_shape, strict=True))
    ]


# -- the four questions -----------------------------------------------------------------------------------------------


def answers(plan: Plan) -> list[tuple[str, str, str]]:
    """The four questions of the report: (question, short answer, further details)."""
    return [_fits(plan), _bottleneck(plan), _recomputed(plan), why_not(plan)]


def _fits(plan: Plan) -> tuple[str, str, str]:
    question, peak, limit = "Does it fit?", plan.predicted.peak_bytes, limit_bytes(plan)
    moment = peak_moment(plan)
    largest = max(plan.predicted.parts.items(), key=lambda item: item[1], default=None)
    details = f"The peak is in {moment.name}. " if moment else ""
    details += f"The largest part: {largest[0]}, {show_bytes(largest[1])}." if largest else ""
    if limit is None:
        return question, f"{show_bytes(peak)} per device", details
    limit_name = "budget" if plan.memory_budget_bytes else "usable memory"
    fits = peak <= limit
    free = (
        f"{show_bytes(limit - peak)} of the {limit_name} are free" if fits else f"{show_bytes(peak - limit)} too much"
    )
    return question, f"{'Yes' if fits else 'No'}: {show_bytes(peak)} of {show_bytes(limit)}", f"{free}. {details}"


def _bottleneck(plan: Plan) -> tuple[str, str, str]:
    predicted = plan.predicted
    busy = sorted(busy_parts(predicted, replayed_seconds(plan)).items(), key=lambda item: -item[1])
    name, seconds = busy[0]
    step, sums = predicted.step_seconds, collective_sums(plan)
    after = [f"{other} {show_share(count, step)}" for other, count in busy[1:] if count >= 0.005 * step]
    details = f"Then {', '.join(after)}. " if after else ""
    if sums and name == "communication":
        first = sums[0]
        details += f"The longest: {first.kind} {first.phase} over {first.axis}, {show_seconds(first.seconds)}. "
    elif sums:
        hidden = show_seconds(max(-step_parts(predicted).get("hidden", 0.0), 0.0))
        whole = show_seconds(predicted.comm_seconds + replayed_seconds(plan))
        details += f"Compute hides {hidden} of {whole} of communication. "
    if predicted.flops:
        details += f"Model FLOPs per device: {show_amount(flops_per_device_second(plan), 'FLOP/s')}"
        peak = _peak_flops_per_s(plan)
        details += f", {show_share(flops_per_device_second(plan), peak)} of the peak rate." if peak else "."
    return (
        "Where does the time go?",
        f"{name.capitalize()}: {show_share(seconds, step)} of {show_seconds(step)}",
        details,
    )


def _peak_flops_per_s(plan: Plan) -> float:
    """The device's peak rate in the plan's compute dtype; 0 if it is not known."""
    dtype = (plan.precision.get("compute") or plan.precision.get("parameter") or "").removeprefix("torch.")
    rates = plan.cluster.get("device", {}).get("flops_per_s", {})
    return float(rates.get(dtype, 0.0))


def _recomputed(plan: Plan) -> tuple[str, str, str]:
    question = "What is recomputed?"
    if not plan.recompute:
        return question, "Nothing", "Every activation that backward needs is kept."
    names = [name for name, _ in recomputed_names(plan.recompute)]
    listed = ", ".join(names[:_SEGMENTS]) + (f" and {len(names) - _SEGMENTS} more" if len(names) > _SEGMENTS else "")
    return question, f"{recomputed_ops(plan):,} of {len(plan.nodes):,} ops", f"{replay_cost(plan)}. Parts: {listed}."


def why_not(plan: Plan) -> tuple[str, str, str]:
    """Why the plan is not FSDP, the usual choice; without FSDP in the comparison, why not its best alternative."""
    if not plan.comparison:
        details = "Run autopar compare … --out plan.json to plan the known schemes too."
        return "Why not FSDP?", "Not compared", details
    by_name = {a.name: a for a in plan.comparison}
    other = by_name.get("fsdp") or min(plan.comparison, key=lambda a: (not a.fits, _seconds(a)))
    question, p, own = f"Why not {other.name.upper()}?", other.predicted, plan.predicted
    if p is None:
        return question, "It has no plan", other.note
    if not other.fits:
        least = other.smallest_budget_bytes
        needs = f"; it needs at least {show_bytes_up(least)}" if least else ""
        details = (
            f"Its fastest plan takes {show_seconds(p.step_seconds)} and {show_bytes(p.peak_bytes)} per device{needs}."
        )
        return question, "It does not fit", details
    ratio = p.step_seconds / own.step_seconds
    if ratio < 1.001:
        return question, "It is as fast", f"{show_seconds(p.step_seconds)} and {show_bytes(p.peak_bytes)} per device."
    theirs, ours = step_parts(p), step_parts(own)
    differences = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in {**theirs, **ours}}
    name, extra = max(differences.items(), key=lambda item: item[1])
    text = f"{show_seconds(extra)} more {name} a step, {show_bytes(p.peak_bytes)} per device at the peak."
    slower = f"It is {100 * (ratio - 1):.1f} % slower" if ratio < 1.1 else f"It takes {ratio:.2f} times as long"
    return question, f"{slower}: {show_seconds(p.step_seconds)}", text


# -- trees ------------------------------------------------------------------------------------------------------------


def _layout_branches(plan: Plan) -> list[Branch]:
    branches = []
    for line in layout_tree(plan):
        row = line.row
        if row is None:
            branches.append((line, Branch(line.label, repeats=line.repeats)))
            continue
        words = zip(row.layout.placements, row.factors, plan.axis_names, plan.mesh_shape, strict=True)
        chips = tuple(_chip(p, word, name, size) for p, word, name, size in words)
        branches.append((line, Branch(labelled(line.label, row.names), show_shape(row.shape), "", chips, line.repeats)))
    return _nested(branches)


def _parameter_branches(plan: Plan) -> list[Branch]:
    branches = []
    for line in parameter_tree(plan):
        row = line.row
        label = ".".join(part for part in (line.label, row.name if row else "") if part)
        if row is None:
            branches.append((line, Branch(label, repeats=line.repeats)))
            continue
        axes = zip(row.storage.placements, plan.axis_names, plan.mesh_shape, strict=True)
        chips = tuple(_chip(p, "", name, size) for p, name, size in axes)
        detail = f"{row.dtype}; {row.moved or 'not moved'}"
        branches.append((line, Branch(label, show_shape(row.shape), detail, chips, line.repeats)))
    return _nested(branches)


def _chip(placement: Placement, word: str, axis: str, size: int) -> Chip:
    state = "sharded" if placement.is_sharded else "replicated" if placement.is_replicated else "partial"
    of = {"sharded": f"sharded on dim {placement.dim}", "replicated": "replicated", "partial": "partial sum"}[state]
    return Chip(str(placement), state, f"axis {axis}, {size} devices: {of}{f' ({word})' if word else ''}")


def _nested(lines: Sequence[tuple[Line[Any], Branch]]) -> list[Branch]:
    top: list[Branch] = []
    open_: list[tuple[int, Branch]] = []
    for line, branch in lines:
        while open_ and open_[-1][0] >= line.depth:
            open_.pop()
        (open_[-1][1].children if open_ else top).append(branch)
        open_.append((line.depth, branch))
    return top


def _size(branches: Sequence[Branch]) -> int:
    return sum(1 + _size(branch.children) for branch in branches)
