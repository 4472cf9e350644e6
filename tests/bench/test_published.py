"""Published runs as given plans: the table has every one of them, and predictions of single layers are close."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import published
import pytest

ROWS = list(csv.DictReader(Path(published.__file__).with_name("published_runs.csv").read_text().splitlines()))


def test_every_run_is_a_plan() -> None:
    left = {row["id"] for row in ROWS if not row["id"].startswith(("galv-", "kor22-t4"))}
    assert left == published.RUNS.keys()
    assert {row["recompute"] for row in ROWS if row["id"].startswith("kor22-t4")} == published.LAYERS.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if row["id"] in published.RUNS], ids=lambda row: row["id"])
def test_a_run_is_its_row(row: dict[str, str]) -> None:
    """The run has the row's batch, and its figure is a time."""
    run = published.RUNS[row["id"]]
    assert run.batch * run.micro_batches == int(row["global_batch"])
    assert published.published_seconds(row, run) > 0


@pytest.mark.slow
def test_layers_of_22b_under_five_plans() -> None:
    """2205.05198, table 4, from the cluster preset alone."""
    found = published.layer_times([row for row in ROWS if row["id"].startswith("kor22-t4")])
    errors = [abs(predicted / measured - 1) for _, measured, predicted in found]
    assert len(errors) == 15
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.25


def test_runs_of_22b_and_of_a_compiled_7b() -> None:
    found = published.steps([row for row in ROWS if row["id"].startswith(("kor22-t5", "fms-7B"))])
    assert len(found) == 3
    assert statistics.median(abs(predicted / measured - 1) for _, measured, predicted in found) <= 0.12
