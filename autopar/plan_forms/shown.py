"""The methods of `Plan` that show it as text, HTML, pictures or in a notebook; `autopar.report` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.arguments.text_files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from autopar.plans import Plan


class Shown:
    """The base class of `Plan` with the methods that show it; no other class derives from it."""

    def explain(self) -> str:
        """The plan as text: layouts by layer, collectives, memory, recompute, certificate."""
        from autopar.report.text import explain

        return explain(cast("Plan", self))

    def to_html(self, path: str | Path, title: str = "plan") -> None:
        """Write the report as one HTML file that opens offline; InputError where it cannot be."""
        from autopar.report.page import page

        write_text("the report", path, page(cast("Plan", self), title))

    def plot_memory(self, axes: Axes | None = None) -> Axes:
        """Draw bytes over a step with matplotlib, on `axes` or new ones."""
        from autopar.report.pictures import plot_memory

        return plot_memory(cast("Plan", self), axes)

    def plot_timeline(self, axes: Axes | None = None) -> Axes:
        """Draw where the seconds of a step go, alternatives below it, with matplotlib."""
        from autopar.report.pictures import plot_timeline

        return plot_timeline(cast("Plan", self), axes)

    def plot_tradeoff(self, axes: Axes | None = None) -> Axes:
        """Draw seconds by memory budget with matplotlib; InputError where `compare(tradeoff=...)` made no points."""
        from autopar.report.pictures import plot_tradeoff

        return plot_tradeoff(cast("Plan", self), axes)

    def __repr__(self) -> str:
        from autopar.report.text import one_line

        return one_line(cast("Plan", self))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from autopar.report.page import snippet

        return snippet(cast("Plan", self))
