"""Figures of the ablation, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import features
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import Record
from summary import Effect, planned_effects

_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2")
_MARKS = "osD^vP"


def draw(folder: Path, records: Sequence[Record]) -> None:
    """Draw `features.svg` (planned runs, a point for each case) and `measured.svg` (on ranks, with intervals).

    A figure without runs is not drawn. The bytes of the files depend on the records alone.
    """
    with matplotlib.rc_context({"svg.hashsalt": "ablation", "svg.fonttype": "none"}):
        effects = planned_effects(records)
        if effects:
            _save(_planned(effects), folder / "features.svg")
        measured = [r for r in records if r["kind"] == "measured"]
        if measured:
            _save(_measured(measured), folder / "measured.svg")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


def _planned(effects: Sequence[Effect]) -> Figure:
    """One row per feature: step time without it over that with it; cases that do not fit are at the right edge."""
    names = [name for name in features.FEATURES if any(e.feature == name for e in effects)]
    models = list(dict.fromkeys(e.on["model"] for e in effects))
    figure = Figure(figsize=(8, 0.45 * len(names) + 1.2), layout="constrained")
    axes: Axes = figure.subplots()
    ratios = [1 + e.slower for e in effects if e.slower is not None]
    beyond = max([1.1, *ratios]) * 1.15
    for place, model in enumerate(models):
        points = [e for e in effects if e.on["model"] == model and (e.slower is not None or e.on["fits"])]
        shift = 0.5 * ((place + 0.5) / len(models) - 0.5)
        axes.plot(
            [beyond if e.slower is None else 1 + e.slower for e in points],
            [names.index(e.feature) + shift for e in points],
            marker=_MARKS[place % len(_MARKS)],
            color=_COLOURS[place % len(_COLOURS)],
            linestyle="none",
            alpha=0.7,
            label=model,
        )
    axes.axvline(1, color="#888888", linewidth=0.8)
    if any(e.slower is None and e.on["fits"] for e in effects):
        axes.axvline(beyond, color="#b3261e", linewidth=0.8, linestyle=":")
        axes.text(beyond, -0.8, "does not fit", color="#b3261e", ha="right", va="center", fontsize=8)
    axes.set_xscale("log")
    ticks = [t for t in (0.5, 0.8, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100) if min([1, *ratios]) <= t <= beyond]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.5, -1.1), xlabel="predicted step without the feature / with it")
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return figure


def _measured(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(8, 0.4 * len(records) + 1.4), layout="constrained")
    time, memory = figure.subplots(1, 2, sharey=True)
    places = range(len(records))
    middle = [r["ratio"] for r in records]
    errors = [[r["ratio"] - r["ratio_low"] for r in records], [r["ratio_high"] - r["ratio"] for r in records]]
    time.errorbar(middle, places, xerr=errors, fmt="o", color=_COLOURS[0], capsize=3)
    time.set(xlabel="step off / on, median and 95 %")
    memory.plot([r["off_peak_bytes"] / r["on_peak_bytes"] for r in records], places, "o", label="measured")
    predicted = [r["off_predicted_bytes"] / r["on_predicted_bytes"] for r in records]
    memory.plot(predicted, places, "x", color=_COLOURS[1], label="predicted")
    memory.set(xlabel="peak bytes off / on")
    memory.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    time.set_yticks(places, [r["feature"] for r in records])
    time.invert_yaxis()
    for axes in (time, memory):
        axes.axvline(1, color="#888888", linewidth=0.8)
    return figure
