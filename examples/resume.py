"""Training that resumes after failures: a process is killed, a machine is lost, or fewer machines remain.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/resume.py --folder checkpoints

Kill a process, or all of them, and start again on any number of processes: training resumes from the last complete
checkpoint. On the same number of processes the losses are bitwise those of a run without interruption, also with
dropout. On another number it plans again, and losses are equal up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autopar

WIDTH, HEADS, SEQUENCE, BATCH = 32, 4, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before_attention(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.o(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(functional.gelu(self.up(self.before_mlp(x)))))


class ByteModel(nn.Module):
    """Predicts the next byte; returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embed(ids)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Batches:
    """Random batches of the standard library's text; its state is that of its generator."""

    def __init__(self, seed: int = 0) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(self.text) - SEQUENCE - 1, (BATCH,), generator=self.generator)
        rows = torch.stack([self.text[start : start + SEQUENCE + 1] for start in starts.tolist()]).long()
        return {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    arguments = _arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=timedelta(seconds=arguments.timeout))  # how long a rank waits for a hung one
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    torch.manual_seed(0)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    model: nn.Module = ByteModel().to(kind, dtype)
    data = Batches()

    found = autopar.latest_checkpoint(arguments.folder)
    plan = found.plan_for(mesh) if found else None
    example = {"ids": torch.zeros(BATCH, SEQUENCE, dtype=torch.long), "labels": torch.zeros(BATCH, SEQUENCE).long()}
    model = autopar.autoparallelize(model, example, mesh, plan=plan, precision=dtype, constraints=arguments.constraint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    more = {"schedule": schedule, "data": data}
    start = autopar.load_checkpoint(model, optimizer, found, extra_state=more) if found else 0
    _log(arguments.losses, start=start, ranks=dist.get_world_size(), plan="saved" if plan else "new")

    for step in range(start + 1, arguments.steps + 1):
        loss = model(**{name: tensor.to(kind) for name, tensor in data.next().items()})
        loss.backward()
        if autopar.gradients_are_finite(model):
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        _log(arguments.losses, step=step, loss=loss.item())
        if step % arguments.every == 0 or step == arguments.steps:
            saved = autopar.save_checkpoint(
                model,
                optimizer,
                arguments.folder,
                step=step,
                extra_state=more,
                keep=arguments.keep,
                asynchronous=arguments.asynchronous,
            )
    if start < arguments.steps:
        saved.result()
    dist.destroy_process_group()


def _log(path: Path | None, **entries: object) -> None:
    """Write one line, on rank 0."""
    if dist.get_rank() == 0:
        line = json.dumps(entries)
        print(line, flush=True)
        if path is not None:
            with path.open("a") as file:
                file.write(line + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="seen by all machines")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--asynchronous", action="store_true", help="write checkpoints in the background")
    parser.add_argument("--constraint", action="append", default=[], help="as in autopar.plan: fsdp, tp, a pin")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a collective may take")
    parser.add_argument("--losses", type=Path, help="file that each step's loss is added to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
