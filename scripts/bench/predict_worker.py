"""One rank of `scripts/bench/predict.py`, under torchrun: the peak of a step of each plan in a file of jobs."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import predict_models
from peak_memory import PeakMemory

from autopar import Plan, autoparallelize


def peak_bytes(job: dict[str, Any]) -> int:
    """Peak bytes of this rank in a step with existing optimizer states."""
    torch.manual_seed(0)
    plan = Plan.load(job["plan"])
    mesh = init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=plan.axis_names)
    batch = predict_models.batch(job["model"], job["batch"], job["length"])
    model = autoparallelize(predict_models.build(job["model"]), batch, mesh, plan=plan)
    optimizer = predict_models.optimizer_for(job["optimizer"], model.parameters())
    for parameter in model.parameters():  # a step with zero gradients creates the states
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    memory = PeakMemory(torch.device("cpu"))
    with memory.measure(model, optimizer, batch):
        for _ in range(plan.micro_batches):
            output = model(**batch)  # kept alive during backward, as in most training loops
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return memory.peak_bytes


def main() -> None:
    jobs = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {}
    for job in json.loads(jobs.read_text()):
        largest = torch.tensor(peak_bytes(job))
        gc.collect()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found[job["number"]] = int(largest)
        if dist.get_rank() == 0:
            print(f"{job['model']}, plan {Path(job['plan']).name}: {found[job['number']]} bytes", file=sys.stderr)
            jobs.with_suffix(".measured.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
