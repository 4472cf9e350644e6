"""Monitored training on real ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from call_cases import built, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

STEPS = 4


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def trained(model: nn.Module, batch: torch.Tensor, **options: Any) -> list[dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    lines: list[dict[str, Any]] = []
    with autopar.monitor(model, log=lines.append, **options) as watch:
        for _ in range(STEPS):
            for _ in range(2):
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            other.step()  # a step of another model's optimizer
            with torch.no_grad():
                model(batch)  # no training
    optimizer.step()
    assert watch.last is not None
    return lines


def words(inputs: str) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2,))
    ids = torch.arange(8 * 6).view(8, 6) % 32
    model = autopar.autoparallelize(Words(), {"ids": ids}, mesh, constraints="ddp", inputs=inputs, micro_batches=2)
    return trained(model, ids.chunk(2)[dist.get_rank()] if inputs == "local" else ids, deviation=100)


def numbers() -> dict[str, Any]:
    """Monitored figures of every second step, of a plan for another optimizer, which needs less memory."""
    mesh, options = init_device_mesh("cpu", (2,)), {"constraints": "fsdp", "micro_batches": 2, "optimizer": "sgd"}
    model = autopar.autoparallelize(built().float(), {"x": rows().float()}, mesh, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lines = trained(model, rows().float(), every=2, deviation=0.01)
    return {"lines": lines, "told": [str(w.message) for w in told if "the peak of a step" in str(w.message)]}


def ranges() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(built(), {"x": rows()}, mesh, constraints="fsdp")
    model(rows()).backward()
    with torch.profiler.profile() as profile:
        model(rows()).backward()
    return sorted({event.name for event in profile.events() if event.name.startswith("autopar")})


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "words-global": lambda: words("global"),
        "words-local": lambda: words("local"),
        "numbers": numbers,
        "ranges": ranges,
    }
}
