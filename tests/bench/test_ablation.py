"""The ablation grid: interrupted, resumed, divided among workers, and made into tables and figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import ablate
import features
import pytest
import torch
from records import append, read_records
from torch import nn

from autopar import Cluster
from autopar.cost.collectives import collective_seconds
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.stopwatch import Stopwatch

SCRIPT = Path(ablate.__file__)
RESTRICTED = ["recompute", "joint", "joint-ladder", "zero", "zero-across", "sharing", "overlap", "overlap-blind"]
PLANNED = {"models": ["gpt2-tiny"], "meshes": [[2], [2, 2]], "budgets": ["4GiB"], "preset": "h100"}


def _written(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps(entries))
    return path


def _command(grid: Path, out: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), "--grid", str(grid), "--out", str(out)]


def _environment(worker: int = 0, workers: int = 1) -> dict[str, str]:
    return {**os.environ, "RANK": str(worker), "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}


def _run(grid: Path, out: Path, *place: int) -> str:
    done = subprocess.run(_command(grid, out), env=_environment(*place), stderr=subprocess.PIPE, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_killed_runs_are_resumed_and_tables_are_made(tmp_path: Path) -> None:
    """After a kill between two runs that left a truncated line, only the missing runs are run."""
    measured = {"measured": ["overlap"], "model": "gpt2-tiny", "ranks": 2, "pairs": 2}
    grid = _written(tmp_path / "grid.json", {**PLANNED, "meshes": [[2]], "features": ["recompute", "zero"]}, measured)
    out = tmp_path / "out"
    with subprocess.Popen(_command(grid, out), env=_environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if line.startswith("gpt2-tiny")), "")
        process.kill()
    path = out / "runs.0.jsonl"
    before = path.read_text().splitlines(keepends=True)
    assert "nothing off" in said
    assert not (out / "report.md").exists()
    path.write_text(before[0] + '{"key": "cut sh')

    again = _run(grid, out)
    lines = path.read_text().splitlines(keepends=True)
    assert lines[0] == before[0]
    assert len(lines) == len({json.loads(line)["key"] for line in lines}) == 4
    assert "nothing off" not in again

    report = (out / "report.md").read_text()
    assert "Not complete" not in report
    assert "| recompute | 1 |" in report
    assert "| overlap | gpt2-tiny, 2 ranks | 2 |" in report
    assert (out / "tables.tex").read_text().count(r"\toprule") == report.count("\n## ") + 1
    for name in ("features.svg", "measured.svg"):
        assert ElementTree.parse(out / name).getroot().tag.endswith("svg")
    images = [(out / name).read_bytes() for name in ("features.svg", "measured.svg")]
    assert "gpt2-tiny" not in _run(grid, out), "nothing is left to run"
    assert [(out / name).read_bytes() for name in ("features.svg", "measured.svg")] == images


@pytest.mark.slow
def test_workers_share_a_grid_and_off_is_never_faster(tmp_path: Path) -> None:
    """Each worker runs its part and the last one writes the report; with fewer choices no plan gets better."""
    grid, out = _written(tmp_path / "grid.json", {**PLANNED, "features": RESTRICTED}), tmp_path / "out"
    first = _run(grid, out, 0, 2)
    assert "8 of 17 runs are done" in first  # zero-across needs two axes
    assert not (out / "report.md").exists()
    _run(grid, out, 1, 2)
    assert (out / "report.md").exists()
    records = read_records(out)
    assert {path.name for path in out.glob("*.jsonl")} == {"runs.0.jsonl", "runs.1.jsonl"}
    assert len(records) == 17
    for mesh in ([2], [2, 2]):
        on = next(r for r in records if r["mesh"] == mesh and r["feature"] == "nothing off")
        for off in (r for r in records if r["mesh"] == mesh and r["fits"]):
            assert off["step_seconds"] >= on["step_seconds"] * (1 - 2e-3), off["feature"]


def test_a_damaged_line_is_no_result(tmp_path: Path) -> None:
    append(tmp_path, 0, {"key": "a"})
    append(tmp_path, 0, {"key": "b"})
    assert [r["key"] for r in read_records(tmp_path)] == ["a", "b"]
    path = tmp_path / "runs.0.jsonl"
    path.write_text(path.read_text().replace('{"key": "a"}', '{"key": '))
    with pytest.raises(SystemExit, match="line 1, is damaged"):
        read_records(tmp_path)


class _TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128, bias=False)
        self.second = nn.Linear(64, 128, bias=False)
        self.before = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.before(x)
        return (self.first(made) + self.second(made)).sum()


def test_readers_that_share_nothing_pay_twice() -> None:
    """One tensor is gathered for two products: without sharing there is a second gather in forward."""
    cluster = Cluster.preset("h100", (4,))
    constraints = ("param:* = S0", "activation:before = S0", "activation:first = S1", "activation:second = S1")
    request = request_of(cluster, "1GiB", "fp32", constraints=constraints)
    watch = Stopwatch()
    model, inputs = _TwoReaders(), {"x": torch.empty(32, 64)}
    prepared = prepare(model, trace_for(model, inputs, None, request, watch), request, watch)
    plan = prepared.solve(memory_budget_bytes=request.memory_budget_bytes, constraints=constraints)
    shared = next(c for c in plan.collectives if c.bytes == 32 * 64 * 4 // 4)
    assert (shared.kind, shared.count, shared.cause) == ("all_gather", 1, "activations")
    more = features.unshared_seconds(prepared, plan)
    assert more == pytest.approx(collective_seconds("all_gather", shared.bytes, cluster.axes[0]))
    assert more == pytest.approx(shared.seconds)
