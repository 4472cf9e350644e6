"""Starts real ranks for tests; one launch runs many cases, with a time limit.

Cases are functions in a dict `CASES` of the worker module. Each rank runs all of them in order, and reports for each
what it returned, or its error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks


def launch(
    worker: str,
    ranks: int,
    *,
    cases: Iterable[str] | None = None,
    backends: str = "gloo",
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 300,
) -> list[dict[str, Any]]:
    """Run `worker` (a file of this folder with a dict CASES) on `ranks` processes; returns each rank's results by case.

    `cases`: the cases to run; None: all. If the process group has a backend for GPUs or the other device
    (`tests/other_device`), that device replaces the CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**(environment or {}), "CASES": "" if cases is None else json.dumps(list(cases))}
        arguments: Any = {"ranks": ranks, "environment": variables, "timeout_seconds": timeout_seconds}
        run_ranks(_run, Path(folder), worker, backends, **arguments)
        return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]


def selected(request: pytest.FixtureRequest, parameter: str = "case") -> list[Any]:
    """The values of a parameter in the collected tests of this module, so that only their cases are run."""
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(call.params[parameter] for call in calls if parameter in call.params))


def needed(request: pytest.FixtureRequest, cases: Iterable[str], *parameters: str, of: Iterable[str]) -> list[str]:
    """The names of `cases`, except those of the grid `of` that no collected test needs.

    A case of the grid is named by the values of these parameters, joined by "-".
    """
    calls = [item.callspec for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {"-".join(call.params[name] for name in parameters) for call in calls if {*parameters} <= {*call.params}}
    grid = {*of}
    return [case for case in cases if case not in grid or case in wanted]


def _run(folder: Path, worker: str, backends: str) -> None:
    """Run one rank, in its own process."""
    mine = folder / f"rank{os.environ['RANK']}.json"
    warnings.filterwarnings("error", category=UserWarning, module=r"autopar\Z")
    if backends != "gloo":
        sys.path.insert(0, str(Path(__file__).parents[1] / "other_device"))
        from other_device import NAME, stand_in_for_the_cpu

        stand_in_for_the_cpu("cuda" if "cuda" in backends else NAME)
    dist.init_process_group(backends, timeout=timedelta(seconds=180))
    chosen = json.loads(os.environ["CASES"] or "null")
    report: dict[str, Any] = {}
    for name, case in _cases(worker).items():
        if chosen is not None and name not in chosen:
            continue
        torch.manual_seed(0)
        try:
            report[name] = {"value": case()}
        except Exception as error:
            report[name] = {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        mine.write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


def _cases(worker: str) -> Mapping[str, Any]:
    """The cases of a file of this folder for the number of ranks."""
    file = Path(__file__).with_name(worker)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    cases: Mapping[str, Any] = module.CASES[dist.get_world_size()]
    return cases


def values(ranks: list[dict[str, Any]], case: str) -> list[Any]:
    """What a case returned on each rank; fails if it raised an error."""
    for rank in ranks:
        assert "error" not in rank[case], rank[case]["traceback"]
    return [rank[case]["value"] for rank in ranks]
