"""Ranks that shard a vocabulary which no mesh divides: embedding, head and loss on shards of unequal length."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from applying import error_of
from safetensors.torch import load_file
from small_language import gpt2, llama, losses_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from peak_memory import PeakMemory
from planning import eager_cluster
from promotion import Promotion

VOCABULARY, ROWS, LENGTH, STEPS = 257, 8, 16, 3
Pins = tuple[str, ...]


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (functools.partial(gpt2, vocabulary=VOCABULARY), "transformer.wte"),
    "wide": (functools.partial(gpt2, vocabulary=4099), "transformer.wte"),  # its logits take most of the memory
    "llama": (functools.partial(llama, VOCABULARY), "model.embed_tokens"),
}


def pins(model: str, weight: str, logits: str) -> Pins:
    """Constraints by name: the storage of the embedding's weight, and the layout of logits, inside and as returned."""
    return (
        f"param:{MODELS[model][1]}.weight = {weight}",
        f"activation:lm_head = {logits}",
        f"output:1 = {logits}",
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """Tokens including the last one of the vocabulary, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    ids[0, :2] = torch.tensor([VOCABULARY - 1, VOCABULARY - 2])
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    labels[0, :2] = ids[0, :2]
    return {"input_ids": ids, "labels": labels}


def build(model: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[model][0]().double().train()


def trained(model: nn.Module) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses_of(model, optimizer, map(batch, range(STEPS))), optimizer


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Peak bytes of one more step, on the rank with the most."""
    memory = PeakMemory(torch.device("cpu"))
    inputs = batch(STEPS)
    with memory.measure(model, optimizer, inputs):
        output = model(**inputs)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    largest = torch.tensor(memory.peak_bytes)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def equals_one_process(name: str, shape: tuple[int, ...], constraints: Pins) -> dict[str, Any]:
    """Losses and parameters against one process, the factors that the plan splits, memory, and checkpoints."""
    with Promotion():
        alone = build(name)
        losses_alone, _ = trained(alone)
        mine = [autopar.plan(build(name), batch(0), eager_cluster(shape), constraints=constraints)]
        dist.broadcast_object_list(mine)  # plans contain their planning time, which differs by rank
        [plan] = mine
        model = autopar.autoparallelize(build(name), batch(0), init_device_mesh("cpu", shape), plan=plan)
        losses, optimizer = trained(model)
        logits = model(**batch(0)).logits
        found = {
            "loss_error": max(abs(a - b) for a, b in zip(losses, losses_alone, strict=True)),
            "parameter_error": error_of(model, alone),
            "logits_error": (logits.full_tensor() - alone(**batch(0)).logits).abs().max().item(),
            "logits": str(logits.placements),
            "locals": sorted({node.local for node in plan.nodes}),
            "loss": [str(node.inputs[0]) for node in plan.nodes if node.local == "cross_entropy"],
            "predicted": plan.predicted.peak_bytes,
            "measured": peak_bytes(model, optimizer),
        }
        return found | through_files(name, model, optimizer, shape)


def through_files(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...]
) -> dict[str, float]:
    """Saved by ranks with shards of the vocabulary; loaded by ranks that hold it whole, by one process, and by them."""
    folder = Path(os.environ["FOLDER"], f"{name}-{'x'.join(map(str, shape))}-{os.environ['WORLD_SIZE']}")
    autopar.save_checkpoint(model, optimizer, folder / "checkpoint", step=STEPS).result()
    whole = autopar.autoparallelize(
        build(name), batch(0), init_device_mesh("cpu", (dist.get_world_size(),)), constraints="ddp"
    )
    resumed = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    checkpoint = autopar.latest_checkpoint(folder / "checkpoint")
    assert checkpoint is not None
    autopar.load_checkpoint(whole, resumed, checkpoint)
    autopar.export_full_state(model, folder / "model.safetensors")
    dist.barrier()
    alone = build(name)
    missing = alone.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    found = {"loaded_error": error_of(model, whole), "exported_error": error_of(model, alone)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    autopar.load_weights(model, folder / "model.safetensors")
    return found | {"read_error": error_of(model, alone)}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "gpt2-2": functools.partial(equals_one_process, "gpt2", (2,), pins("gpt2", "S0", "S2")),
        "wide-2": functools.partial(equals_one_process, "wide", (2,), pins("wide", "S0", "S2")),
        "llama-2": functools.partial(equals_one_process, "llama", (2,), pins("llama", "S0", "S2")),
    },
    4: {
        "gpt2-4": functools.partial(equals_one_process, "gpt2", (4,), pins("gpt2", "S0", "S2")),
        "gpt2-2x2": functools.partial(equals_one_process, "gpt2", (2, 2), pins("gpt2", "S0,S0@2", "S2,S2@2")),
        "llama-2x2": functools.partial(equals_one_process, "llama", (2, 2), pins("llama", "S1,S0", "S0,S2")),
    },
}
