"""Draws the pictures of the documentation from autopar's own layouts and plans, into docs/pictures.

    .venv/bin/python scripts/draw_docs.py

The plans are of GPT-2 (the default config of transformers) with 32 sequences of 1024 tokens on 2 x 4 H100s, by the
preset: nothing is measured, so that the pictures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar import Cluster, Plan, compare, plan
from autopar.layout import Layout, take_shard
from autopar.sources import Source, load_source

MESH = (2, 4)
LAYOUTS = {
    "S0, R": "rows over dp,\nwhole on tp",
    "S0, S1": "rows over dp,\ncolumns over tp",
    "R, S1": "whole on dp,\ncolumns over tp",
    "S0, S0@2": "rows over dp,\nthen over tp",
    "R, S1@2": "columns over tp,\ninside 2 outer parts",
}
TIGHT = "3.5GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    folder = parser.parse_args().out
    # Text stays text, and nothing in the files depends on the run, so that unchanged pictures have no diff.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "autopar", "font.size": 10})
    _save(layouts(), folder / "layouts.svg")
    source = load_source("hf:GPT2LMHeadModel", batch=32, sequence=1024)
    cluster = Cluster.preset("h100", MESH, ("dp", "tp"))
    roomy = compare(source.model, source.meta_args, cluster, tradeoff=8)
    _save(memory(roomy, _tight(source, cluster)), folder / "memory.svg")
    _save(_one(roomy.plot_timeline), folder / "comparison.svg")
    _save(_one(roomy.plot_tradeoff), folder / "tradeoff.svg")


def _tight(source: Source, cluster: Cluster) -> Plan:
    return plan(source.model, source.meta_args, cluster, memory_budget=TIGHT)


def layouts() -> Figure:
    """An 8 x 8 tensor on a mesh of 2 x 4, each element in the colour of the first device that holds it."""
    figure, panels = pyplot.subplots(1, len(LAYOUTS), figsize=(11, 2.9), layout="constrained")
    for panel, (text, words) in zip(panels, LAYOUTS.items(), strict=True):
        panel.imshow(_owners(Layout.parse(text)), cmap="tab10", vmin=0, vmax=9, alpha=0.75)
        panel.set(xticks=[], yticks=[], title=text, xlabel=words)
        panel.hlines(np.arange(0.5, 7), -0.5, 7.5, color="white", linewidth=0.5)
        panel.vlines(np.arange(0.5, 7), -0.5, 7.5, color="white", linewidth=0.5)
    return figure


def _owners(layout: Layout) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """For each element, the lowest rank that holds it."""
    owners = np.full((8, 8), -1)
    elements = torch.arange(64).view(8, 8)
    for rank, coordinate in reversed(list(enumerate(itertools.product(*map(range, MESH))))):
        owners.reshape(-1)[take_shard(elements, layout, MESH, coordinate).flatten().numpy()] = rank
    return owners


def memory(roomy: Plan, tight: Plan) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
    roomy.plot_memory(left)
    tight.plot_memory(right)
    for axes, title in ((left, "as much as the device has"), (right, f"a budget of {TIGHT}")):
        axes.set(title=title, xlabel="")
    left.set_ylim(0, 6)
    left.get_legend().remove()
    right.set_ylabel("")
    return figure


def _one(draw: Callable[[Axes], Axes]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    draw(axes)
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
