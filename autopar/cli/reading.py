"""The commands that read a plan: `explain` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import check_folder, load_plan, say, say_json, write
from autopar.report.figures import summary

PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN", help="A plan that `autopar plan --out` wrote.", show_default=False)
]


def explain(
    path: PlanFile,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Print a saved plan: layouts by layer, collectives, memory, recompute, seconds, certificate."""
    loaded = load_plan(path)
    if json:
        say_json(summary(loaded))
    else:
        say(loaded.explain())


def report(
    path: PlanFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="What the report is of. Default: the plan's file name.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON what was written.")] = False,
) -> None:
    """Write a plan as one HTML file that opens offline: memory, collectives, layouts, comparison, certificate."""
    from autopar.report.page import page

    loaded = load_plan(path)
    check_folder("--out", out)
    text = page(loaded, title=title or path.stem)
    write(text, out, "report")
    if json:
        say_json({"written": str(out), "bytes": len(text.encode())})
