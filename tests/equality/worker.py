"""One rank of the equality runs: trains every listed case under its plan and compares it with one process.

torchrun starts it with a folder that holds `jobs.json` and the plans; rank 0 writes a line of JSON for each case.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "other_device"))
sys.path.insert(0, str(Path(__file__).parent))
import models
from counting import CollectiveCounter
from promotion import Promotion

import autopar

STEPS = 5
CLIP = 0.5


def optimizer_of(job: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    if job["optimizer"] == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_alone(job: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    dtype = getattr(torch, job["dtype"])
    model = models.build(job["model"], dtype)
    optimizer = optimizer_of(job, model)
    losses = []
    for step in range(STEPS):
        loss = models.reference_loss(job["model"], model, models.batch(job["model"], step, dtype))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(models.reference_loss(job["model"], model, evaluation_batch(job)).item())
    return losses, dict(model.state_dict())


def evaluation_batch(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Smaller than a training batch, so that it has another graph key and the model is traced and planned again."""
    batch = models.batch(job["model"], STEPS, getattr(torch, job["dtype"]))
    return {name: tensor[: models.BATCH // 2] for name, tensor in batch.items()}


def train_planned(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    dtype = getattr(torch, job["dtype"])
    device = job["device"]
    mesh = init_device_mesh(device, tuple(job["mesh"]))
    plan = autopar.Plan.load(folder / job["plan"])
    case = models.CASES[job["model"]]
    model = models.build(job["model"], dtype)
    if device != "cpu":
        state = model.state_dict()
        with torch.device(device):
            model = models.build(job["model"], dtype)
        model.load_state_dict(state)
    inputs = on(device, models.batch(job["model"], 0, dtype))
    planned = autopar.autoparallelize(model, inputs, mesh, plan=plan, loss_fn=case.loss_fn)
    optimizer = optimizer_of(job, planned)
    losses, counted = [], {}
    for step in range(STEPS):
        inputs = on(device, models.batch(job["model"], step, dtype))
        with CollectiveCounter(mesh) if step == 1 else contextlib.nullcontext() as counter:
            output = planned(**inputs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
        if counter is not None:
            counted = counter.table()
        torch.nn.utils.clip_grad_norm_(planned.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if job["evaluate"]:
        planned.eval()
        with torch.no_grad():
            output = planned(**on(device, evaluation_batch(job)))
            losses.append((output if isinstance(output, torch.Tensor) else output.loss).item())
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in planned.state_dict().items()}
    return {"losses": losses, "state": on("cpu", state), "counted": counted}


def on(device: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def compare(job: dict[str, Any], folder: Path, alone: dict[str, Any]) -> dict[str, Any]:
    with Promotion() if job["dtype"] == "float64" else contextlib.nullcontext():
        planned = train_planned(job, folder)
        key = job["model"], job["dtype"]
        if key not in alone and dist.get_rank() == 0:
            alone[key] = train_alone(job)
    if dist.get_rank() != 0:
        return {}
    losses, state = alone[key]
    loss_error = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(losses, planned["losses"], strict=False))
    assert list(state) == list(planned["state"]), "state_dict keys differ"
    errors = {
        name: ((want - planned["state"][name]).abs().max() / want.abs().max().clamp(min=1.0)).item()
        for name, want in state.items()
        if want.numel()
    }
    worst = max(errors, key=errors.__getitem__)
    return {"loss_error": loss_error, "parameter_error": errors[worst], "worst": worst, "counted": planned["counted"]}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    jobs, backends = json.loads((folder / f"{name}.jobs.json").read_text()), "gloo"
    if jobs[0]["device"] != "cpu":
        import other_device

        backends = other_device.join(jobs[0]["device"])
    dist.init_process_group(backends, timeout=timedelta(seconds=120))
    alone: dict[str, Any] = {}
    with open(folder / f"{name}.results.jsonl", "w") if dist.get_rank() == 0 else contextlib.nullcontext() as results:
        for job in jobs:
            try:
                outcome = compare(job, folder, alone)
            except Exception:
                outcome = {"error": traceback.format_exc()}
                print(f"rank {dist.get_rank()} {job['id']}: {outcome['error']}", flush=True)
            failed = torch.tensor(float("error" in outcome))
            dist.all_reduce(failed)
            if failed and "error" not in outcome:
                outcome = {"error": "another rank failed"}
            if results is not None:
                results.write(json.dumps({"id": job["id"], **outcome}) + "\n")
                results.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
