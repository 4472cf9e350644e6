"""Peak bytes of one rank while a model on the meta device gets its values, relative to the size of the model.

    torchrun --standalone --nproc-per-node 2 scripts/bench/materialise.py                 # Llama-3.2-3B's sizes, bf16
    torchrun --standalone --nproc-per-node 4 scripts/bench/materialise.py --model 160m    # a small one

Three ways: initial values (`materialise`), writing to files (`export_full_state`), reading the files (`load_weights`).
For each, `tensors`: peak bytes of live storages, tracked by a dispatch mode; `process grew`: the largest growth of the
process' own memory (Linux' RssAnon, sampled every 5 ms). Both are those of the worst rank. Files that are mapped into
memory without a copy do not count. The values are not checked here; the tests do that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.report.tables import table
from autopar.sizes import show_bytes

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import LiveStorages

MODELS: dict[str, dict[str, Any]] = {
    "3b": {  # the sizes of Llama-3.2-3B
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "160m": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16},
    "5m": {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6},
}


class Watched:
    """What was measured: seconds, and peak bytes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tensor_bytes = self.process_bytes = 0


@contextmanager
def watched(model: nn.Module) -> Iterator[Watched]:
    """Measure the body. What the model holds beforehand counts in `tensor_bytes` but not in `process_bytes`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found, done = Watched(), threading.Event()
    before, start = _own_bytes(), time.perf_counter()

    def look() -> None:
        while not done.wait(0.005):
            found.process_bytes = max(found.process_bytes, _own_bytes() - before)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with LiveStorages([*model.parameters(), *model.buffers()]) as live:
            yield found
    finally:
        done.set()
        looking.join()
    found.seconds, found.tensor_bytes = time.perf_counter() - start, live.peak_bytes


def _own_bytes() -> int:
    """Private memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon in /proc/self/status")


def planned(sizes: dict[str, Any], mesh: DeviceMesh) -> nn.Module:
    """A model on the meta device, in bf16, fully sharded."""
    config = transformers.LlamaConfig(**sizes, dtype=torch.bfloat16, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    ids = torch.empty(mesh.size(), 64, dtype=torch.long, device="meta")
    return autopar.autoparallelize(model, {"input_ids": ids, "labels": ids}, mesh, constraints="fsdp")


def worst(value: float) -> float:
    """The largest of the ranks' values."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest.item())


def measure(sizes: dict[str, Any], mesh: DeviceMesh, folder: Path) -> list[dict[str, Any]]:
    """Measure the three ways; one row each."""
    rows = []
    model = planned(sizes, mesh)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())

    def row(way: str, found: Watched) -> None:
        tensors, process, seconds = map(worst, (found.tensor_bytes, found.process_bytes, found.seconds))
        rows.append({"way": way, "model_bytes": model_bytes, "tensor_bytes": tensors, "process_bytes": process})
        rows[-1] |= {"ranks": mesh.size(), "seconds": seconds}

    torch.manual_seed(0)
    with watched(model) as found:
        autopar.materialise(model)
    row("initial values", found)
    with watched(model) as found:
        autopar.export_full_state(model, folder, largest_file="500MB")
    row("written to files", found)
    del model
    model = planned(sizes, mesh)
    with watched(model) as found:
        autopar.load_weights(model, folder)
        autopar.materialise(model)  # the rotary frequencies, which files do not hold
    row("read from files", found)
    return rows


def shown(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table. For "written to files", `process grew` does not count the shards of the model."""
    lines = [
        [
            row["way"],
            str(row["ranks"]),
            show_bytes(row["model_bytes"]),
            show_bytes(int(row["tensor_bytes"])),
            f"{row['tensor_bytes'] / row['model_bytes']:.1%}",
            show_bytes(int(row["process_bytes"])),
            f"{row['process_bytes'] / row['model_bytes']:.1%}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    return table(lines, "<>>>>>>>", head=["way", "ranks", "model", "tensors", "", "process grew", "", "seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="3b")
    parser.add_argument("--folder", type=Path, help="where files are written (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        shared = [made]
        dist.broadcast_object_list(shared, src=0)
        rows = measure(MODELS[options.model], mesh, Path(shared[0]))
        dist.barrier()
    if dist.get_rank() == 0:
        print(*shown(rows), sep="\n")
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + os.linesep)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
