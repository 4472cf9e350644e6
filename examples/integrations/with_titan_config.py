"""Training with a job file of torchtitan: model, mesh, scheme, batch, schedule, logging and checkpoints.

    torchrun --nproc-per-node 2 examples/integrations/with_titan_config.py
    python examples/integrations/with_titan_config.py    # the same losses on one process, without autopar

--config FILE takes another job. The data is the bytes of Python's own standard library ([training] dataset = "bytes").
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path

import small
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

import autopar
from autopar.errors import InputError
from autopar.integrations.tensorboard import TensorBoard
from autopar.integrations.torchtitan import Job, read_job


def main() -> None:
    options = small.arguments()
    job = read_job(options.config, small.processes())
    if job.training.dataset != "bytes":
        raise InputError(f"[training] dataset = {job.training.dataset!r}: this example has 'bytes' alone")
    torch.manual_seed(job.training.seed or 0)
    if small.processes() > 1:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(kind, job.mesh_shape, mesh_dim_names=job.axis_names)
        with torch.device("meta"):
            model = job.build()  # shapes, no memory
        model = autopar.autoparallelize(model, job.examples(), mesh, **job.options())
        autopar.materialise(model)
    else:
        model = job.build()
    losses = train(job, model, options.out / job.job.dump_folder)
    small.report(losses, model, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(job: Job, model: torch.nn.Module, folder: Path) -> list[float]:
    """Train, and return the losses of all steps."""
    wanted, settings = job.training, job.optimizer
    kind: type[torch.optim.Adam | torch.optim.AdamW] = getattr(torch.optim, settings.name)
    betas = (settings.beta1, settings.beta2)
    optimizer = kind(model.parameters(), settings.lr, betas, settings.eps, settings.weight_decay)
    scheduler = LambdaLR(optimizer, lambda step: rate(job, step))
    data = small.Bytes(job.batch * wanted.steps, wanted.seq_len).rows.to(next(model.parameters()).device)
    checkpoints, losses = folder / job.checkpoint.folder, []
    last = autopar.latest_checkpoint(checkpoints) if job.checkpoint.enable else None
    more = {"scheduler": scheduler}
    done = autopar.load_checkpoint(model, optimizer, last, extra_state=more) if last is not None else 0
    with TensorBoard(folder / job.metrics.save_tb_folder) if job.metrics.enable_tensorboard else nullcontext() as board:
        for step in range(done + 1, wanted.steps + 1):
            loss = 0.0
            for rows in data[(step - 1) * job.batch : step * job.batch].split(job.rows):
                part = model(input_ids=rows, labels=rows).loss / job.micro_batches
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss)
            if board is not None and step % job.metrics.log_freq == 0:
                board.log(step, {"loss": loss, "lr": scheduler.get_last_lr()[0]})
            if job.checkpoint.enable and step % job.checkpoint.interval == 0:
                autopar.save_checkpoint(model, optimizer, checkpoints, step=step, extra_state=more)
    return losses


def rate(job: Job, step: int) -> float:
    """The factor of the learning rate at a step, as in torchtitan: warm-up, constant, decay."""
    told, steps = job.lr_scheduler, job.training.steps
    up = min(told.warmup_steps, steps)
    down = steps - up if told.decay_ratio is None else min(round(steps * told.decay_ratio), steps - up)
    if step < up:
        return (step + 1) / (up + 1)
    if step < steps - down:
        return 1.0
    gone = (step - (steps - down) + 1) / (down + 1)
    curve = {"linear": 1 - gone, "sqrt": 1 - math.sqrt(gone), "cosine": 0.5 * (1 + math.cos(math.pi * gone))}
    return told.min_lr_factor + (1 - told.min_lr_factor) * curve[told.decay_type]


if __name__ == "__main__":
    main()
