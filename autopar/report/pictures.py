"""Pictures of a plan, by matplotlib, with the same figures, colours and order as in the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from autopar.plans import Plan
from autopar.report.colours import COLOURS
from autopar.report.figures import busy_parts
from autopar.report.timeline import timeline
from autopar.sizes import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 1 << 30
_OTHER = "#bbbbbb"


def plot_memory(plan: Plan, axes: Axes | None = None) -> Axes:
    """Bytes of one device over the moments of a step (see `timeline`), stacked by kind, with the budget."""
    drawn, shown = _axes(axes), timeline(plan)
    if shown is None:
        raise InputError("the plan predicts no moments: there is no memory to draw")
    edges = list(range(len(shown.moments) + 1))
    below = [0.0] * len(shown.moments)
    for kind in shown.kinds:
        above = [low + m.parts.get(kind, 0) / _GIB for low, m in zip(below, shown.moments, strict=True)]
        drawn.stairs(above, edges, baseline=below, fill=True, color=COLOURS.get(kind, _OTHER), label=kind)
        below = above
    if shown.limit_bytes is not None:
        name = "budget" if plan.memory_budget_bytes else "device"
        drawn.axhline(shown.limit_bytes / _GIB, color="#b3261e", linestyle="--", label=name)
    drawn.set(xlim=(0, edges[-1]), ylim=(0, shown.top_bytes / _GIB), ylabel="GiB per device", xticks=[])
    drawn.set_xlabel(f"{shown.moments[0].name} … {shown.moments[-1].name}")
    _legend(drawn)
    return drawn


def plot_timeline(plan: Plan, axes: Axes | None = None) -> Axes:
    """Seconds of a step by part (see `busy_parts`): one bar for the plan and one for each alternative."""
    drawn = _axes(axes)
    rows = [("this plan", plan.predicted, True)]
    rows += [(a.name, a.predicted, a.fits) for a in plan.comparison if a.predicted is not None]
    starts = [0.0] * len(rows)
    for part in ("compute", "recompute", "communication", "optimizer"):
        seconds = [busy_parts(p)[part] for _, p, _ in rows]
        drawn.barh(range(len(rows)), seconds, left=starts, color=COLOURS[part], label=part)
        starts = [start + length for start, length in zip(starts, seconds, strict=True)]
    drawn.set_yticks(range(len(rows)), [name if fits else f"{name} (does not fit)" for name, _, fits in rows])
    drawn.invert_yaxis()
    drawn.set_xlabel("seconds of a step; what hides behind something else is left out")
    _legend(drawn)
    return drawn


def plot_tradeoff(plan: Plan, axes: Axes | None = None) -> Axes:
    """Seconds of a step by memory budget."""
    if len(plan.tradeoff) < 2:
        raise InputError("the plan has no trade-off: make it with autopar.compare(..., tradeoff=8)")
    drawn = _axes(axes)
    budgets = [point.budget_bytes / _GIB for point in plan.tradeoff]
    seconds = [point.step_seconds for point in plan.tradeoff]
    drawn.plot(budgets, seconds, marker="o", label="best plan")
    drawn.plot(
        plan.predicted.peak_bytes / _GIB,
        plan.predicted.step_seconds,
        marker="*",
        linestyle="none",
        label=f"this plan ({show_bytes(plan.predicted.peak_bytes)})",
    )
    drawn.set(xlabel="budget per device, GiB", ylabel="seconds of a step", ylim=(0, 1.08 * max(seconds)))
    drawn.legend()
    return drawn


def _axes(axes: Axes | None) -> Axes:
    if axes is not None:
        return axes
    new_axes: Axes = pyplot().subplots(figsize=(8, 4), layout="constrained")[1]
    return new_axes


def pyplot() -> Any:
    """The module `matplotlib.pyplot`; InputError, which says how to install it, if it is missing."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise InputError("pictures need the package matplotlib: pip install 'autopar[examples]'") from error
    return pyplot


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
