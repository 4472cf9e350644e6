"""`autopar simulate`: a planned step as a Chrome trace and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import check_folder, load_plan, progress, say, say_json, write
from autopar.cli.question import PlanQuestion, answered_by, asks, prepared
from autopar.errors import InputError
from autopar.planning.simulation import simulated
from autopar.report.pictures import pyplot
from autopar.report.streams import chrome_trace, save_streams
from autopar.report.tables import show_seconds, table, wrap

_PICTURES = (".png", ".svg", ".pdf")
_LEGEND = (
    "(step: simulated on streams; predicted step: the plan's prediction, by which plans are compared; compute: all "
    "ops, with recomputed ones and the optimizer's, each alone on the device; exposed: the rest of the step; busy: how "
    "long a stream runs something. The busy time of compute includes the slowdown by simultaneous communication, but "
    "no waits; that of an axis includes hidden communication.)"
)


@asks
def simulate(
    plan_question: PlanQuestion,
    plan: Annotated[Path | None, typer.Option(help="A plan (JSON) of MODEL. Default: plan it now.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the events here, for chrome://tracing or Perfetto.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the streams here: .png, .svg or .pdf.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Simulate the timeline of one planned step of MODEL: which communication is hidden, and where compute waits."""
    check_folder("--trace", trace)
    check_folder("--picture", picture)
    if picture is not None and picture.suffix not in _PICTURES:
        raise InputError(f"--picture {picture}: its name must end in one of {', '.join(_PICTURES)}")
    if picture is not None:
        pyplot()  # raises now, before minutes of work, if matplotlib is missing
    loaded = load_plan(plan) if plan is not None else None
    question = plan_question.on_mesh(loaded)
    if loaded is not None:
        question, request = answered_by(question, loaded, memory_too=True)
    else:
        request = question.request()
    with progress("...") as status:
        ready = prepared(question, request, status)
        if loaded is None:
            loaded = ready.solve()
        step = simulated(ready, loaded)
    figures = {
        "step_seconds": step.step_seconds,
        "predicted_step_seconds": loaded.predicted.step_seconds,
        "compute_seconds": step.compute_seconds,
        "exposed_seconds": step.exposed_seconds,
        **{f"{stream}_busy_seconds": busy for stream, busy in step.busy_seconds().items()},
    }
    if json:
        say_json(figures)
    else:
        rows = [[name.removesuffix("_seconds").replace("_", " "), show_seconds(s)] for name, s in figures.items()]
        say("\n".join([*table(rows, "<>", indent=0), *wrap(_LEGEND, "", " ")]) + "\n")
    if trace is not None:
        import json as encoding

        write(encoding.dumps(chrome_trace(step)), trace, "trace")
    if picture is not None:
        save_streams(step, picture)
