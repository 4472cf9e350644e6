"""Runs the Python blocks of the README on two ranks: torchrun --nproc-per-node 2 readme_blocks.py

Each block gets the objects it refers to: a small model and others. The README's mesh of 4 x 8 GPUs is replaced by one
of 1 x 2 processes. Rank 0 prints the number of blocks that ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import autopar

ROOT = Path(__file__).parents[2]
INSTEAD = {'"cuda", (4, 8)': '"cpu", (1, 2)'}
ROWS, LENGTH = 4, 16
CONFIG = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=64,
    use_cache=False,
)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2 * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + LENGTH)
        return {"input_ids": ids, "labels": ids}


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(CONFIG)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def known() -> dict[str, Any]:
    """The names that every block may use."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cpu", (2,))
    return {
        "model": LlamaForCausalLM(CONFIG),
        "ids": ids,
        "batch": batch,
        "whole_batch": batch,
        "meta_args": batch,
        "mesh": mesh,
        "loader": DataLoader(Rows(), ROWS),
        "config": CONFIG,
        "LlamaForCausalLM": LlamaForCausalLM,
        "torch": torch,
        "DataLoader": DataLoader,
        "dataset": Rows(),
        "autopar": autopar,
        "autoparallelize": autopar.autoparallelize,
        "Plan": autopar.Plan,
    }


def trained(names: dict[str, Any]) -> None:
    """Add a planned model, its parts, and its optimizer."""
    names["model"] = autopar.autoparallelize(names["model"], names["batch"], names["mesh"], inputs="local")
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names["step"] = 3


def weights(names: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        names["model"].save_pretrained("folder")
    dist.barrier()


def frameworks(names: dict[str, Any]) -> None:
    names["accelerator"] = Accelerator(cpu=True)
    names["arguments"] = TrainingArguments("out", use_cpu=True, report_to=[])
    names["data"], names["loader"] = Rows(), DataLoader(Rows(), ROWS // 2)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())


def loops(names: dict[str, Any]) -> None:
    names["Trainer"], names["module"], names["loader"] = lightning.Trainer, Module(), DataLoader(Rows(), ROWS // 2)


BEFORE: dict[str, Callable[[dict[str, Any]], None]] = {  # preparations, keyed by text in the block
    "load_weights": weights,
    "autopar.sampler": trained,
    "latest_checkpoint": trained,
    "PlannedTrainer": frameworks,
    "PlannedStrategy": loops,
}


def main() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        for theirs, ours in INSTEAD.items():
            block = block.replace(theirs, ours)
        names = known()
        for word, prepare in BEFORE.items():
            if word in block:
                prepare(names)
        exec(compile(block, "README.md", "exec"), names)
    if dist.get_rank() == 0:
        print(f"{len(blocks)} blocks")


if __name__ == "__main__":
    main()
