"""Ranks that train models which return more than a loss: measured peaks of steps, and the prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autopar

WIDTH, CLASSES = 64, 512
Results = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Returning(nn.Module):
    """Blocks and a head; `more` makes the other results from the input, the blocks' results and the logits."""

    def __init__(self, more: Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor], Results], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.more = more

    def forward(self, x: torch.Tensor) -> Results:
        hidden, states = x, []
        for block in self.blocks:
            hidden = block(hidden)
            states.append(hidden)
        logits = self.head(hidden)
        return {"loss": torch.tanh(logits).square().mean(), **self.more(x, states, logits)}


MORE: dict[str, Callable[[torch.Tensor, list[torch.Tensor], torch.Tensor], Results]] = {
    "probabilities": lambda x, states, logits: {"p": logits.softmax(-1)},
    "scaled": lambda x, states, logits: {"p": logits.sigmoid() * 2.0},
    "read further": lambda x, states, logits: {"p": functional.gelu(logits).sigmoid()},
    "views": lambda x, states, logits: {"logits": {"as": logits, "flat": logits.flatten(0, 1)}},
    "states": lambda x, states, logits: {"states": [x, *states]},
    "states together": lambda x, states, logits: {"states": states, "all": torch.stack([x, *states]).softmax(-1)},
    "of each block": lambda x, states, logits: {"p": [one.softmax(-1) for one in states]},
    "losses": lambda x, states, logits: {"other": logits.exp().mean(), "states": states[0]},
}


class Compared(nn.Module):
    """Layers and a loss against a target. Sizes are odd, so that the ranks' losses are no equally weighted summands."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(63, 127), nn.Linear(127, 63)
        self.loss = getattr(functional, loss)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Results:
        return {"loss": self.loss(torch.sigmoid(self.down(self.up(x))), y)}


# losses whose storage torch makes larger than the scalar
WIDE = "binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"


def peaks_of_loss(loss: str) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, mesh = {"x": torch.randn(7, 255, 63), "y": torch.rand(7, 255, 63)}, init_device_mesh("cpu", (2,))
    return steps_of(autopar.autoparallelize(Compared(loss), batch, mesh), batch)


def peaks(more: str, constraints: str | None, blocks: int = 3) -> dict[str, Any]:
    torch.manual_seed(0)
    batch, mesh = {"x": torch.randn(8, 32, WIDTH)}, init_device_mesh("cpu", (2,))
    model = autopar.autoparallelize(Returning(MORE[more], blocks), batch, mesh, constraints=constraints)
    return steps_of(model, batch)


def peaks_within_budget(more: str, constraints: str, part: float) -> dict[str, Any]:
    """Peaks of a plan under a budget of a part of the free plan's peak; the budget is kept."""
    torch.manual_seed(0)
    batch, mesh = {"x": torch.randn(8, 32, WIDTH)}, init_device_mesh("cpu", (2,))
    cluster = autopar.Cluster.preset("cpu", (2,))
    free = autopar.plan(Returning(MORE[more], 3), batch, cluster, constraints=constraints).predicted.peak_bytes
    budget = int(free * part)
    model = autopar.autoparallelize(
        Returning(MORE[more], 3), batch, mesh, constraints=constraints, memory_budget=budget
    )
    found = steps_of(model, batch)
    assert max(found["measured"]) <= budget * 1.001
    return found


def steps_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return measured(model, batch, torch.optim.AdamW(model.parameters()), losses)


def losses(results: Results) -> torch.Tensor:
    """The sum of all scalar results."""
    return torch.stack([one for one in results.values() if isinstance(one, torch.Tensor) and not one.dim()]).sum()


PRESETS = ("ddp", "fsdp", "tp", "ddp(recompute=full)")
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {loss: functools.partial(peaks_of_loss, loss) for loss in WIDE}
    | {f"{more}, {preset}": functools.partial(peaks, more, preset) for more in MORE for preset in PRESETS}
    | {f"{more}, free": functools.partial(peaks, more, None) for more in MORE}
    | {
        f"{more}, {preset}, a budget": functools.partial(peaks_within_budget, more, preset, 0.9)
        for more, preset in (("states together", "tp"), ("probabilities", "ddp"))
    }
}
