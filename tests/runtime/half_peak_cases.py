"""Ranks that store fp32 and compute in bf16: measured peaks of steps under budgets, and the prediction.

A tight budget first drops the bf16 copies of parameters: they are freed in forward and made again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peak_cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.planning.stages import prepare, request_of, trace_for
from autopar.stopwatch import Stopwatch


def peaks(name: str, part: float, *constraints: str) -> dict[str, Any]:
    """`part`: position of the budget on the way from the smallest one to the peak without any."""
    build, rows = peak_cases.MODELS[name]
    ids = torch.randint(peak_cases.WORDS, (rows, peak_cases.LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, other = build(2), build(2)
    other.load_state_dict(model.state_dict())
    found = [planned(model, batch, mesh, part, constraints).to_json() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    plan = autopar.Plan.from_json(found[0])
    ready = autopar.autoparallelize(model, batch, mesh, plan=plan)
    peaks = peak_cases.measured(ready, batch, torch.optim.AdamW(ready.parameters()))
    keeping = replace(plan, parameters=tuple(replace(one, regather=False) for one in plan.parameters))
    kept = autopar.autoparallelize(other, batch, mesh, plan=keeping)
    peak_cases.measured(kept, batch, torch.optim.AdamW(kept.parameters()))
    pairs = zip(ready.parameters(), kept.parameters(), strict=True)
    return peaks | {
        "again": sum(one.regather for one in plan.parameters),
        "equal": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),  # after all steps
    }


def planned(
    model: nn.Module, batch: dict[str, torch.Tensor], mesh: DeviceMesh, part: float, constraints: tuple[str, ...]
) -> autopar.Plan:
    request, watch = request_of(mesh, precision="bf16", constraints=constraints), Stopwatch()
    prepared = prepare(model, trace_for(model, batch, None, request, watch), request, watch)
    most = prepared.solve().predicted.peak_bytes
    try:
        return prepared.solve(memory_budget_bytes=1)
    except autopar.InfeasibleError as error:
        least = error.smallest_budget_bytes
    assert least is not None
    return prepared.solve(memory_budget_bytes=round(least + (most - least) * part))


WHOLE = "param:* = R"
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    1: {"llama": functools.partial(peaks, "llama", 0.6)},
    2: {
        "llama, whole": functools.partial(peaks, "llama", 0.5, WHOLE),
        "llama": functools.partial(peaks, "llama", 0.3),
        "gpt2, whole": functools.partial(peaks, "gpt2", 0.5, WHOLE),
    },
}
