"""Ablation: a grid of runs, each with one feature off, and the tables and figures of a paper.

    python scripts/ablation/ablate.py                                       # the whole grid, one process
    torchrun --nproc-per-node 4 scripts/ablation/ablate.py                  # divided among processes
    sbatch --array=0-15 --wrap "python scripts/ablation/ablate.py --out /shared/ablation"
    python scripts/ablation/ablate.py --grid mine.json                      # another grid; `grid.py` has the format
    python scripts/ablation/ablate.py --report                              # tables and figures of the runs so far

A run is one line of JSON in `OUT/runs.WORKER.jsonl`. Started again, with any number of workers, the script skips runs
that are done. A worker that finds all runs done writes `report.md`, `tables.tex` and the figures. Workers share only a
folder. Runs with the same model and mesh share a trace, and go to one worker. Measured runs start ranks of their own on
this host, with gloo on CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

sys.path.insert(0, str(Path(__file__).parent))
import features
import measured
from ablated_models import model_and_inputs
from drawing import draw
from features import case_of, plan_without
from grid import Run, read_grid
from records import append, read_records
from summary import write_report

import autopar
from autopar.sizes import parse_bytes


def worker_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """This worker's number and the number of workers, from a SLURM array, torchrun or srun; (0, 1) without any.

    >>> worker_of({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_COUNT": "3"})
    (1, 3)
    >>> worker_of({"RANK": "2", "WORLD_SIZE": "4"}), worker_of({})
    ((2, 4), (0, 1))
    """
    if "SLURM_ARRAY_TASK_COUNT" in environment:
        first = int(environment["SLURM_ARRAY_TASK_MIN"])
        return int(environment["SLURM_ARRAY_TASK_ID"]) - first, int(environment["SLURM_ARRAY_TASK_COUNT"])
    for number, count in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if number in environment and count in environment:
            return int(environment[number]), int(environment[count])
    return 0, 1


def made_runs(runs: list[Run], time_limit: float) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Plan the runs of one group; yields each run with its figures."""
    if runs[0].kind == "measured":
        yield from measured_runs(runs)
        return
    first = runs[0]
    case = case_of(*model_and_inputs(first.model, first.devices), first.mesh, first.preset, time_limit)
    budgets = {text: case.under(parse_bytes(text)) for text in dict.fromkeys(run.budget for run in runs)}
    for run in runs:
        begun = time.process_time()
        found = plan_without(budgets[run.budget], run.feature)
        yield run, {**found, "cpu_seconds": time.process_time() - begun}


def measured_runs(runs: list[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Measure each run in a launch of its own, so that a failure does not affect the runs after it."""
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder) / "runs.json"
            wanted.write_text(json.dumps([asdict(run)]))
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={run.devices}", measured.__file__, str(wanted)]
            subprocess.run(command, check=True, env={**_own_environment(), "OMP_NUM_THREADS": "1"})
            found = json.loads(wanted.with_suffix(".done.json").read_text())
        yield run, found[run.feature]


def _own_environment() -> dict[str, str]:
    """The environment without torchrun's variables, which are for this worker and not for the ranks that it starts."""
    told = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(told)}


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grid", type=Path, default=here / "paper.json", help="what to run (default: paper.json)")
    parser.add_argument("--out", type=Path, default=Path("out/ablation"), help="where results lie and are looked for")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds of the solver for one plan")
    parser.add_argument("--report", action="store_true", help="run nothing: tables and figures of what is done")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    grid = read_grid(options.grid, tuple(features.FEATURES), measured.FEATURES)
    options.out.mkdir(parents=True, exist_ok=True)
    worker, workers = worker_of(os.environ)
    groups = list(dict.fromkeys(run.group for run in grid))
    if not options.report:
        done = {record["key"] for record in read_records(options.out)}
        for group in groups[worker::workers]:
            runs = [run for run in grid if run.group == group and run.key not in done]
            for run, found in made_runs(runs, options.time_limit) if runs else ():
                whole = {"key": run.key, **asdict(run), **found}
                append(options.out, worker, {**whole, "devices": run.devices, "autopar": autopar.__version__})
                print(
                    run.model,
                    run.mesh,
                    run.budget,
                    run.feature,
                    found.get("step_seconds", found.get("ratio")),
                    file=sys.stderr,
                )
    keys = {run.key for run in grid}
    records = [record for record in read_records(options.out) if record["key"] in keys]
    if len(records) == len(keys) or options.report:
        write_report(options.out, records, len(keys))
        draw(options.out, records)
    else:
        print(f"{len(records)} of {len(keys)} runs are done", file=sys.stderr)


if __name__ == "__main__":
    main()
