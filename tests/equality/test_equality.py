"""N ranks equal one process: every model, four kinds of plan, 2 ranks, 4 ranks and a 2x2 mesh, real gloo processes.

One launch for each world size runs all of its cases; each test checks one case. The plan is of the kind in the case's
name, losses and parameters after five steps are those of one process, and the collectives that ran are those that the
plan announced, by kind, axis, count and bytes.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest

from autopar.plans import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "other_device"))
sys.path.insert(0, str(Path(__file__).parent))
import models
import planning
from other_device import build, can_be_built

pytestmark = pytest.mark.timeout(3600)  # the first test waits for every launch

_KINDS_ELSEWHERE = {"gpt2": "sharded", "llama": "recompute", "bert": "free", "t5": "tp", "resnet": "sharded"}
_ON_THE_OTHER = ("gpt2", "llama")
_ON_FOUR = {(4,): ("gpt2", "tp"), (2, 2): ("resnet", "free")}
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
JOBS = [
    planning.Job(model, dtype, mesh, kind)
    for mesh in ((2,), (4,), (2, 2))
    for model in models.CASES
    for dtype in TOLERANCE
    for kind in planning.KINDS
] + [
    planning.Job(model, "float64", (2,), kind, device)
    for device in ("other", "cuda")
    for model in models.CASES
    for kind in planning.KINDS
]


def _marked(job: planning.Job) -> Any:
    """The case, marked slow unless it is in float64 and either of one model on 2 ranks (or one kind of plan of
    another), or a small one on a mesh of 4.

    On GPUs one kind of plan of most models is quick, and on the other device, where no tensor is on the CPU, of two.
    """
    few = job.model == "gpt2" or job.kind == _KINDS_ELSEWHERE.get(job.model, "sharded")
    small = (job.model, job.kind) == _ON_FOUR.get(job.mesh)
    quick = job.dtype == "float64" and ((job.mesh == (2,) and few) or small)
    marks: list[Any] = []
    if job.device != "cpu":
        quick = _KINDS_ELSEWHERE.get(job.model) == job.kind and (job.device == "cuda" or job.model in _ON_THE_OTHER)
        unbuilt = pytest.mark.skipif(not can_be_built(), reason="the other device needs a C++ compiler and ninja")
        marks = [pytest.mark.gpu if job.device == "cuda" else unbuilt]
    return pytest.param(job, id=job.id, marks=marks if quick else [*marks, pytest.mark.slow])


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Plan and run every selected job; its plan, and the results of its rank 0."""
    folder = tmp_path_factory.mktemp("equality")
    wanted = {
        item.callspec.params["job"]
        for item in request.session.items
        if hasattr(item, "callspec") and "job" in item.callspec.params
    }
    jobs = [job for job in JOBS if job in wanted]
    alike: dict[tuple[object, ...], list[planning.Job]] = {}
    for job in jobs:
        alike.setdefault((job.model, job.dtype, job.mesh, job.device), []).append(job)
    with ProcessPoolExecutor(2, mp_context=forked.context()) as pool:
        futures = [pool.submit(planning.plan_to_files, group, folder) for group in alike.values()]
    errors = {name: error for future in futures for name, error in future.result().items()}
    found: dict[str, dict[str, Any]] = {
        name: {"error": f"planning failed: {error}"} if error else {"plan": Plan.load(folder / f"{name}.plan.json")}
        for name, error in errors.items()
    }
    planned = [job for job in jobs if "plan" in found[job.id]]
    for ranks, device in ((2, "cpu"), (4, "cpu"), (2, "other"), (2, "cuda")):
        mine = [job for job in planned if _ranks(job) == ranks and job.device == device]
        if mine and (device != "other" or can_be_built()):
            if device != "cpu":
                build(device=device == "other")  # once, so that the ranks need not
            for line in _launch(folder, f"ranks{ranks}{device}", mine, ranks):
                found[line["id"]].update(line)
    return found


def _ranks(job: planning.Job) -> int:
    return job.mesh[0] * (job.mesh[1] if len(job.mesh) > 1 else 1)


def _launch(folder: Path, name: str, jobs: list[planning.Job], ranks: int) -> list[dict[str, Any]]:
    descriptions = [
        {
            "id": job.id,
            "model": job.model,
            "dtype": job.dtype,
            "mesh": job.mesh,
            "device": job.device,
            "plan": f"{job.id}.plan.json",
            "optimizer": planning.OPTIMIZERS[job.dtype],
            "evaluate": job.kind == "free",
        }
        for job in jobs
    ]
    (folder / f"{name}.jobs.json").write_text(json.dumps(descriptions))
    worker = Path(__file__).with_name("worker.py")
    log = ""
    try:
        forked.run_script(worker, str(folder), name, folder=folder, ranks=ranks, timeout_seconds=2400)
    except AssertionError as failed:  # then each job without results reports this error
        log = str(failed)
    results = folder / f"{name}.results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    missing = {job.id for job in jobs} - {line["id"] for line in lines}
    return lines + [{"id": job, "error": f"did not run: {log}"} for job in missing]


def _announced(plan: Plan) -> dict[str, list[int]]:
    calls: Counter[str] = Counter()
    volume: Counter[str] = Counter()
    for c in plan.collectives:
        calls[f"{c.kind}@{c.axis}"] += c.count
        volume[f"{c.kind}@{c.axis}"] += c.count * c.bytes
    return {key: [calls[key], volume[key]] for key in sorted(calls)}


@pytest.mark.parametrize("job", [_marked(job) for job in JOBS])
def test_equals_one_process(job: planning.Job, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[job.id]
    assert "error" not in outcome, outcome["error"]
    assert planning.IS_OF_KIND[job.kind](outcome["plan"]), "the plan is not of the kind that the case names"
    assert outcome["loss_error"] <= TOLERANCE[job.dtype]
    assert outcome["parameter_error"] <= TOLERANCE[job.dtype], outcome["worst"]
    assert outcome["counted"] == _announced(outcome["plan"])
