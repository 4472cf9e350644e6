"""The model and data of these examples: a small Llama without dropout, and bytes of Python's standard library."""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQUENCE, STEPS = 8, 64, 6
TITAN = Path(__file__).parent / "titan.toml"


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Consecutive sections of the standard library's modules."""

    def __init__(self, size: int = BATCH * STEPS, length: int = SEQUENCE) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
        text = b"".join(file.read_bytes() for file in files)[: size * length]
        self.rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).view(size, length).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def whole_batch() -> dict[str, torch.Tensor]:
    """An example of a step's inputs, for all processes together."""
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def processes() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def mesh_of_all() -> DeviceMesh:
    """A mesh with all processes on one axis; starts the process group if necessary."""
    return init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (processes(),), mesh_dim_names=("ranks",))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for losses and weights")
    parser.add_argument("--constraint", action="append", default=[], help="as in autopar.plan: fsdp, tp, a pin")
    parser.add_argument(
        "--save-steps", type=int, default=0, help="steps between checkpoints (where the example has them)"
    )
    parser.add_argument("--resume", help="checkpoint to go on from (where the example has them)")
    parser.add_argument("--config", type=Path, default=TITAN, help="a job (the example of torchtitan's files)")
    parsed = parser.parse_args()
    parsed.out.mkdir(parents=True, exist_ok=True)
    return parsed


def report(losses: list[float], model: torch.nn.Module, folder: Path) -> None:
    """On rank 0, print and write the losses, and the share of the parameters that the rank holds."""
    if int(os.environ.get("RANK", 0)) == 0:
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))
        elements = sum(p.numel() for p in model.parameters())
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
        (folder / "result.json").write_text(json.dumps({"losses": losses, "held": held / elements}))
