"""`autopar zoo`: lists the models that have a name, or plans each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from autopar.cli.output import progress, say, say_json
from autopar.cli.question import Question, Training, asks, cluster_of, prepared
from autopar.errors import AutoparError, InputError, budget_bounds
from autopar.planning.stages import Request
from autopar.plans import Plan
from autopar.report.figures import summary
from autopar.report.tables import show_seconds, table
from autopar.sizes import show_bytes, show_bytes_up
from autopar.zoo import ZOO

Names = Annotated[
    list[str] | None, typer.Argument(help="Models of the list. Default: all.", metavar="NAME", show_default=False)
]
Mesh = Annotated[str | None, typer.Option(help="Plan each on this mesh: 8, 4x8. Default: only list them.")]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo with its plan on the mesh, or the reason why it has none."""

    name: str
    plan: Plan | None
    smallest_budget_bytes: int | None = None
    budget_lower_bound_bytes: int | None = None
    note: str = ""


@asks
def zoo(
    training: Training,
    names: Names = None,
    mesh: Mesh = None,
    axis_names: Annotated[str | None, typer.Option(help="Names of the mesh axes: dp,tp.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the models that have a name; with --mesh, plan each of them and print one table."""
    chosen = _chosen(names)
    if mesh is None:
        _list(chosen, json)
        return
    if training.batch is None:
        raise InputError("the models of the zoo have no examples of their own: give --batch (and --seq for text)")
    request = training.on(cluster_of(training.cluster, mesh, axis_names))
    entries = list(_planned(training, request, chosen))
    if json:
        say_json([_figures(entry) for entry in entries])
    else:
        head = [
            "model",
            "parameters",
            "step",
            "compute",
            "recompute",
            "communication",
            "peak memory",
            "gap",
            "planning",
        ]
        say("\n".join(table([_row(entry) for entry in entries], "<>>>>>>>>", head=head, indent=0)) + "\n")
        say("".join(f"{entry.name}: {entry.note}\n" for entry in entries if entry.note))


def _chosen(names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in ZOO:
            raise InputError(f"the zoo has no {name!r}: it has {', '.join(ZOO)}")
    return list(dict.fromkeys(names)) if names else list(ZOO)


def _list(names: Sequence[str], json: bool) -> None:
    if json:
        say_json([{"name": name, **vars(ZOO[name]), "config": dict(ZOO[name].config)} for name in names])
        return
    rows = [[name, ZOO[name].architecture, f"{ZOO[name].parameters:,}"] for name in names]
    say("\n".join(table(rows, "<<>", head=["name", "architecture of transformers", "parameters"], indent=0)) + "\n")


def _planned(training: Training, request: Request, names: Sequence[str]) -> Iterator[Entry]:
    options = {field.name: getattr(training, field.name) for field in fields(Training)}
    with progress("...") as status:
        for number, name in enumerate(names, 1):
            status.update(f"planning {name}, {number} of {len(names)} ...")
            try:
                ready = prepared(Question(model=name, **options), request, status)
                plan = ready.solve()
            except InputError as error:  # wrong options for all models, or a sequence too long for this one
                raise InputError(f"{name}: {error.message}", where=error.where) from error
            except AutoparError as error:  # nothing fits, or the trace failed: other models may have a plan
                yield Entry(name, None, note=error.message, **budget_bounds(error))
            else:
                yield Entry(name, plan)


def _row(entry: Entry) -> list[str]:
    count = f"{ZOO[entry.name].parameters:,}"
    if entry.plan is None:
        needs = f"needs {show_bytes_up(entry.smallest_budget_bytes)}" if entry.smallest_budget_bytes else "no plan"
        return [entry.name, count, "", "", "", "", needs, "", ""]
    p = entry.plan.predicted
    seconds = (p.step_seconds, p.compute_seconds, p.recompute_seconds, p.comm_seconds)
    return [
        entry.name,
        count,
        *map(show_seconds, seconds),
        show_bytes(p.peak_bytes),
        f"{100 * entry.plan.certificate.gap:.2f} %",
        f"{sum(entry.plan.planning_seconds.values()):.1f} s",
    ]


def _figures(entry: Entry) -> dict[str, object]:
    model = {"name": entry.name, "parameters": ZOO[entry.name].parameters}
    bounds = {
        "smallest_budget_bytes": entry.smallest_budget_bytes,
        "budget_lower_bound_bytes": entry.budget_lower_bound_bytes,
        "note": entry.note,
    }
    return {**model, **bounds, **(summary(entry.plan) if entry.plan is not None else {})}
