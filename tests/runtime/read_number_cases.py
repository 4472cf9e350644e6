"""Ranks whose forward reads values of data tensors and selects rows by masks: differences from one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import Plan

Tensor = torch.Tensor


class Masked(nn.Module):
    """A common form of a masked-token loss; it returns metrics as Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16)) for _ in range(2))
        self.layers = nn.Sequential(*blocks)
        self.head = nn.Linear(16, 64)
        self.last_accuracy = 0.0

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        hidden = self.layers(self.embedding(ids))
        mask = labels != -100
        logits = self.head(hidden[mask])
        loss = F.cross_entropy(logits, labels[mask])
        size = hidden.square().mean(-1)
        regular = size[mask].sum() / mask.sum().item() + size.clamp(max=size.max().item() / 2).mean()
        accuracy = (logits.argmax(-1) == labels[mask]).float().mean().item()
        self.last_accuracy = accuracy
        picked = mask.sum().item()
        return loss + 0.1 * regular, {
            "accuracy": accuracy,
            "percent": accuracy * 100,
            "picked": picked,
            "some": picked > 0,
        }


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 64, (8, 6), generator=generator)
    return {"ids": ids, "labels": torch.where(torch.rand(8, 6, generator=generator) < 0.4, ids, -100)}


def beside_one_process(constraints: Any, inputs: str = "global", **options: Any) -> dict[str, Any]:
    """The largest difference of losses and weights in four SGD steps, and the last step's metrics."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Masked().double())
    alone, model = models
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(
        model, batch(0), mesh, optimizer="sgd", constraints=constraints, inputs=inputs, **options
    )
    steps = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, alone)]
    worst, noted = 0.0, []
    for step in range(4):
        whole = batch(step)
        given = {**whole} if inputs == "global" else autopar.local_batch(model, whole)
        losses, noted = [], []
        for one, kwargs in ((model, given), (alone, whole)):
            loss, numbers = one(**kwargs)
            noted.append([*numbers.values(), one.last_accuracy])
            loss.backward()
            losses.append(float(loss))
        for one in steps:
            one.step()
            one.zero_grad()
        worst = max(worst, abs(losses[0] - losses[1]))
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        whole_mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        worst = max(worst, float((whole_mine - its).abs().max()))
    plan: Plan = autopar.plan_of(model)
    split = sum(any("S" in str(layout) for layout in node.outputs) for node in plan.nodes)
    return {"worst": worst, "noted": noted, "kinds": [type(one).__name__ for one in noted[0]], "split": split}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "ddp": functools.partial(beside_one_process, "ddp"),
        "fsdp": functools.partial(beside_one_process, "fsdp"),
        "tp": functools.partial(beside_one_process, "tp"),
        "free": functools.partial(beside_one_process, ()),
        "own rows": functools.partial(beside_one_process, "fsdp", "local"),
        "recomputed": functools.partial(beside_one_process, "fsdp(recompute=full)"),
    }
}
