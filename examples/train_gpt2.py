"""Trains a byte-level GPT-2 on the source files of Python's own standard library.

    torchrun --nproc-per-node 4 examples/train_gpt2.py --mesh 2x2 --memory 100MiB
    python examples/train_gpt2.py                        # the same on one process, without autopar

A plan that `autopar plan train_gpt2:model_and_batch --out plan.json` made can be given with --plan.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peak_memory import PeakMemory
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from autopar import Plan, autoparallelize

LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 6, 256, 8, 256, 8
AXES = {1: ("ranks",), 2: ("dp", "tp")}
MEASURED_STEP = 3  # step whose peak memory is measured; its time does not count


class PythonSources:
    """Batches of bytes of the standard library's modules; a batch depends only on the step."""

    def __init__(self, most_bytes: int = 8 << 20) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:most_bytes]
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(self.bytes) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step))
        ids = torch.stack([self.bytes[start : start + SEQUENCE] for start in starts.tolist()]).long()
        return {"input_ids": ids, "labels": ids}


def model_and_batch() -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    """The model, without dropout so that loss curves can be compared, and an example of its inputs."""
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        n_positions=SEQUENCE,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else transformers warns that it guesses
    return model, {"input_ids": ids, "labels": ids}


def main() -> None:
    arguments = _arguments()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = _mesh(kind, arguments.mesh) if dist.is_torchelastic_launched() else None
    device = torch.device(kind)
    torch.manual_seed(0)
    model, example = model_and_batch()
    model.to(device)
    if mesh is not None:
        plan = Plan.load(arguments.plan) if arguments.plan else None
        model = autoparallelize(model, example, mesh, plan=plan, memory_budget=arguments.memory, precision="fp32")
    rank = dist.get_rank() if dist.is_initialized() else 0

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    data = PythonSources()
    losses, seconds = [], []
    memory = PeakMemory(device)
    with _progress(rank) as progress:
        bar = progress.add_task("", total=arguments.steps, loss=float("nan"), speed=0.0)
        for step in range(arguments.steps):
            batch = {name: tensor.to(device) for name, tensor in data.batch(step).items()}
            begin = time.perf_counter()
            with memory.measure(model, optimizer, batch, when=step == MEASURED_STEP):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            warmup.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            progress.update(bar, advance=1, loss=losses[-1], speed=BATCH * SEQUENCE / seconds[-1])

    if rank == 0:
        steady = sorted(second for step, second in enumerate(seconds) if step > 1 and step != MEASURED_STEP)
        result = {"losses": losses, "step_seconds": steady[len(steady) // 2], "peak_bytes": memory.peak_bytes}
        Path(arguments.out).write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _mesh(kind: str, text: str) -> DeviceMesh:
    """The mesh of the processes along each axis, like 4 or 2x2; each process gets its own GPU if there are any."""
    shape = tuple(map(int, text.split("x")))
    return init_device_mesh(kind, shape, mesh_dim_names=AXES[len(shape)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="4", help="processes along each mesh axis, like 4 or 2x2")
    parser.add_argument("--memory", help="budget of one process, like 100MiB")
    parser.add_argument("--plan", type=Path, help="a plan made before, in place of planning here")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="train_gpt2.json", help="where losses, step seconds and peak bytes go")
    return parser.parse_args()


def _progress(rank: int) -> Progress:
    text = TextColumn(
        "step {task.completed}/{task.total}  loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"
    )
    return Progress(BarColumn(), text, TimeElapsedColumn(), disable=rank != 0)


if __name__ == "__main__":
    main()
