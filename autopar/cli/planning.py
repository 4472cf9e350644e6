"""The commands that plan: `plan`, `compare`, `search` and `check`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import check_folder, load_plan, progress, say, say_json, write
from autopar.cli.question import MeshQuestion, PlanQuestion, Question, answered_by, asks, each_prepared, traced_source
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, InputError, budget_bounds
from autopar.fingerprints.fingerprint import check_fingerprints, fingerprints
from autopar.plan_forms.checks import check_on_graph
from autopar.planning.comparison import alternatives, check_comparison
from autopar.planning.comparison import tradeoff as budget_ladder
from autopar.planning.mesh_search import MeshResult, factorisations, planned_meshes, ranked
from autopar.planning.micro_batches import fastest
from autopar.planning.simulation import streams
from autopar.plans import Plan
from autopar.report.figures import alternative_figures, device_notes, limit_bytes, summary
from autopar.report.tables import show_seconds, table
from autopar.report.text import comparison_table, tradeoff_table
from autopar.sizes import show_bytes, show_bytes_up
from autopar.stopwatch import Stopwatch

DOES_NOT_FIT = 3  # exit code of `check`

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write the plan here, as JSON.")]


@asks
def plan(question: MeshQuestion, out: Out = None, json: Json = False) -> None:
    """Plan the training of MODEL and print the plan. Needs no GPU and no memory for weights."""
    check_folder("--out", out)
    request = question.request()
    with progress("...") as status:
        _, planned = fastest(each_prepared(question, request, status))
    _tell(planned, json, out)


@asks
def compare(
    question: MeshQuestion,
    against: Annotated[list[str] | None, typer.Option(help="Preset or pin to compare with; may be repeated.")] = None,
    tradeoff: Annotated[int, typer.Option(min=0, help="Other budgets to plan too, for a curve (2 or more).")] = 0,
    out: Out = None,
    json: Json = False,
) -> None:
    """Compare the plan of MODEL with the best plans of ddp, fsdp, tp, fsdp+tp and hsdp, on the same cluster."""
    check_folder("--out", out)
    names = check_comparison(against or None, tradeoff)
    request = question.request()
    with progress("...") as status:
        ready, planned = fastest(each_prepared(question, request, status))
        alternatives_found = []
        status.update("solving the first preset ...")
        for alternative in alternatives(ready, names):
            alternatives_found.append(alternative)
            status.update(f"solved {alternative.name}, going on ...")
        points = []
        for point in budget_ladder(ready, tradeoff) if tradeoff else ():
            points.append(point)
            status.update(f"solving budget {len(points) + 1} of {tradeoff} ...")
    planned = replace(
        planned, streams=streams(ready, planned), comparison=tuple(alternatives_found), tradeoff=tuple(points)
    )
    if json:
        own = {**alternative_figures_of(planned), "certificate": dict(vars(planned.certificate))}
        curve = [dict(vars(point)) for point in points]
        say_json({"plan": own, "alternatives": [alternative_figures(a) for a in alternatives_found], "tradeoff": curve})
    else:
        parts = [comparison_table(planned), tradeoff_table(planned)]
        say("\n\n".join("\n".join(lines) for lines in parts if lines) + "\n")
    if out is not None:
        write(planned.to_json(), out, "plan")


def alternative_figures_of(plan: Plan) -> dict[str, object]:
    """The figures of the chosen plan under the same names as those of an alternative."""
    figures = summary(plan)
    shared = {key: figures[key] for key in ("step_seconds", "step_seconds_by_part", "peak_bytes", "limit_bytes")}
    moved = sum(c.bytes * c.count for c in plan.collectives)
    return {**shared, "comm_bytes": moved, "micro_batches": plan.micro_batches}


@asks
def search(
    question: Question,
    devices: Annotated[int, typer.Option(min=1, help="How many devices there are.", show_default=False)],
    most_axes: Annotated[int, typer.Option(min=1, max=3, help="Axes of a mesh at most.")] = 2,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the best plan here, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Choose the mesh: plan MODEL on every factorisation of DEVICES into axes, fastest first."""
    check_folder("--out", out)
    if question.cluster.endswith(".json"):
        raise InputError(
            f"--cluster {question.cluster} was measured on one mesh: search takes a preset (a100, h100, cpu)"
        )
    request = question.on(Cluster.preset(question.cluster, (devices,)))
    meshes = list(factorisations(devices, most_axes))
    results: list[MeshResult] = []
    with progress("...") as status:
        ready = list(each_prepared(question, request, status))
        for number, result in enumerate(planned_meshes(ready, question.cluster, meshes), 1):
            results.append(result)
            status.update(f"solving mesh {min(number + 1, len(meshes))} of {len(meshes)} ...")
    best, *_ = ordered = ranked(results)
    if best.plan is None:
        raise InfeasibleError(
            f"no plan fits on any mesh of {devices} devices; the least that one needs, on {_mesh(best)}: {best.note}",
            smallest_budget_bytes=best.smallest_budget_bytes,
            budget_lower_bound_bytes=best.budget_lower_bound_bytes,
        )
    if json:
        say_json([_figures(result) for result in ordered])
    else:
        head = ["mesh", "step", "ratio", "compute", "recompute", "collectives", "peak", "gap", "micro-batches"]
        rows = [_row(result, best.plan.predicted.step_seconds) for result in ordered]
        shown = len(head) - isinstance(question.counts, int)  # the last column only if there were several numbers
        align = "<>>>>>>>>"[:shown]
        say("\n".join(table([row[:shown] for row in rows], align, head=head[:shown], indent=0)) + "\n")
    if out is not None:
        write(best.plan.to_json(), out, "plan")


def _mesh(result: MeshResult) -> str:
    return "x".join(map(str, result.mesh_shape))


def _row(result: MeshResult, best_seconds: float) -> list[str]:
    if result.plan is None:
        needs = show_bytes_up(result.smallest_budget_bytes) if result.smallest_budget_bytes else "no plan"
        return [_mesh(result), "", "", "", "", "", f"needs {needs}", "", ""]
    p = result.plan.predicted
    return [
        _mesh(result),
        show_seconds(p.step_seconds),
        f"{p.step_seconds / best_seconds:.2f}x",
        show_seconds(p.compute_seconds),
        show_seconds(p.recompute_seconds),
        show_seconds(p.comm_seconds),
        show_bytes(p.peak_bytes),
        f"{100 * result.plan.certificate.gap:.2f} %",
        str(result.plan.micro_batches),
    ]


def _figures(result: MeshResult) -> dict[str, object]:
    figures = {
        "mesh": list(result.mesh_shape),
        "smallest_budget_bytes": result.smallest_budget_bytes,
        "budget_lower_bound_bytes": result.budget_lower_bound_bytes,
        "note": result.note,
    }
    return {**figures, **(alternative_figures_of(result.plan) if result.plan else {})}


@asks
def check(
    plan_question: PlanQuestion,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Check that this plan (JSON) is one of MODEL on this mesh, and fits --memory or its own budget."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Check whether the training of MODEL fits the memory. Exit code 0 if it does, 3 if it does not."""
    loaded = load_plan(plan) if plan is not None else None
    question = plan_question.on_mesh(loaded)
    if loaded is not None:
        return _check_plan(question, loaded, json)
    request = question.request()
    with progress("...") as status:
        try:
            _, planned = fastest(each_prepared(question, request, status))
        except InfeasibleError as error:
            if error.smallest_budget_bytes is None:
                raise
            status.stop()
            if json:
                say_json({"fits": False, **budget_bounds(error), "note": error.message})
            else:
                say(f"does not fit: {error.message}\n")
            return DOES_NOT_FIT
    return _fits(planned, json)


def _check_plan(question: MeshQuestion, loaded: Plan, json: bool) -> int:
    """Check that a saved plan matches the model and mesh, and fits --memory or, without that, its own budget."""
    question, request = answered_by(question, loaded)
    with progress("...") as status:
        source, traced = traced_source(question, request, status, Stopwatch())
    check_fingerprints(loaded.fingerprints, fingerprints(source.model, traced.graph, request.cluster.shape))
    check_on_graph(loaded, traced.graph)
    if request.memory_budget_bytes is not None:
        loaded = replace(loaded, memory_budget_bytes=request.memory_budget_bytes)
    return _fits(loaded, json)


def _fits(plan: Plan, json: bool) -> int:
    """Print whether the plan's peak fits its budget; returns the exit code."""
    limit, peak = limit_bytes(plan), plan.predicted.peak_bytes
    fits = limit is None or peak <= limit
    if json:
        say_json({"fits": fits, **alternative_figures_of(plan), "notes": list(device_notes(plan))})
    else:
        of = f" of {show_bytes(limit)}" if limit is not None else ""
        seconds = show_seconds(plan.predicted.step_seconds)
        say(f"{'fits' if fits else 'does not fit'}: {show_bytes(peak)}{of} per device at the peak, {seconds} a step\n")
        for note in device_notes(plan):
            say(f"{note}\n")
    return 0 if fits else DOES_NOT_FIT


def _tell(plan: Plan, json: bool, out: Path | None) -> None:
    if json:
        print(plan.to_json())
    else:
        say(plan.explain())
    if out is not None:
        write(plan.to_json(), out, "plan")
