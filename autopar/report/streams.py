"""A simulated step as a Chrome trace, and as a picture of its streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cost.simulated import Simulated
from autopar.report.colours import COLOURS
from autopar.report.pictures import pyplot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def chrome_trace(step: Simulated) -> dict[str, Any]:
    """Events in the Trace Event Format (chrome://tracing, Perfetto): one thread per stream, times in microseconds."""
    threads = {stream: number for number, stream in enumerate(step.streams)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": stream}}
        for stream, number in threads.items()
    ]
    spans = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.phase,
            "pid": 0,
            "tid": threads[event.stream],
            "ts": 1e6 * event.start_seconds,
            "dur": 1e6 * event.seconds,
        }
        for event in step.events
    ]
    return {"traceEvents": names + spans, "displayTimeUnit": "ms"}


def plot_streams(step: Simulated, axes: Axes | None = None) -> Axes:
    """One row per stream, coloured by kind of work; gaps in the first row, compute, are waits for communication."""
    if axes is None:
        axes = pyplot().subplots(figsize=(10, 1.2 + 0.5 * len(step.streams)), layout="constrained")[1]
    labelled: set[str] = set()
    for row, stream in enumerate(step.streams):
        kinds: dict[str, list[tuple[float, float]]] = {}
        for event in step.events:
            if event.stream == stream:
                kinds.setdefault(event.kind, []).append((event.start_seconds, event.seconds))
        for kind, spans in kinds.items():
            label = kind if kind not in labelled else None
            axes.broken_barh(spans, (row - 0.4, 0.8), color=COLOURS[kind], label=label)
            labelled.add(kind)
    axes.set_yticks(range(len(step.streams)), step.streams)
    axes.invert_yaxis()
    axes.set(xlim=(0, step.step_seconds), xlabel="seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return axes


def save_streams(step: Simulated, path: Path) -> None:
    """Draw the streams into a file, in the format of its suffix."""
    figure, axes = pyplot().subplots(figsize=(10, 1.2 + 0.5 * len(step.streams)), layout="constrained")
    plot_streams(step, axes)
    figure.savefig(path)
    pyplot().close(figure)
