"""Attributes that forward sets on modules for the loop to read, on real ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from beside_one_process import pair
from loop_cases import PRESETS, whole
from torch import nn

X = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).sin()


class Router(nn.Module):
    """Sets a load-balancing loss, as mixtures of experts do, and tensors of the call in a dict."""

    aux: torch.Tensor
    seen: dict[str, torch.Tensor] | None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.linear(x).softmax(-1)
        self.aux = chosen.mean(0).square().sum()  # the same forward reads it below
        self.seen = {"chosen": chosen, "most": chosen.detach().amax(-1)}
        return x + chosen * self.aux.detach()


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Router() for _ in range(3)))
        self.last_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.layers(x)
        self.last_loss = (result - x.roll(1, 0)).square().mean()
        return result.mean()


def trained(preset: str) -> list[float]:
    """The loop adds the losses that are set on the modules."""
    planned, alone = pair(Mixture, {"x": X}, preset)
    worst = 0.0
    for step in range(3):
        losses = []
        for model in (planned, alone):
            model(X + step)
            aux = sum(router.aux for router in model.layers)
            losses.append(model.last_loss + 0.1 * aux + whole(model.layers[1].seen["chosen"]).square().mean())
            losses[-1].backward()
        worst = max(worst, (losses[0] - losses[1]).abs().item())
        for one, other in zip(planned.parameters(), alone.parameters(), strict=True):
            worst = max(worst, (whole(one.grad) - other.grad).abs().max().item())
        for model in (planned, alone):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        most = [whole(model.layers[0].seen["most"]) for model in (planned, alone)]
        worst = max(worst, (most[0] - most[1]).abs().max().item())
    return [worst, len(planned._autopar.programs)]


def in_eval(preset: str) -> float:
    """Calls in eval mode, also of another batch size, set their own values."""
    planned, alone = pair(Mixture, {"x": X}, preset)
    worst = 0.0
    with torch.no_grad():
        for rows in (8, 6):
            planned.eval()(X[:rows])
            alone.eval()(X[:rows])
            worst = max(worst, (planned.last_loss - alone.last_loss).abs().item())
    return worst


def own_rows() -> float:
    """A loss that is equal on all ranks counts once where each rank has its own rows."""
    planned, alone = pair(Mixture, {"x": X}, "ddp", inputs="local")
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for model, rows in ((planned, mine), (alone, slice(0, 8))):
        (model(X[rows]) + sum(router.aux for router in model.layers)).backward()
    pairs = zip(planned.parameters(), alone.parameters(), strict=True)
    return max((whole(one.grad) - other.grad).abs().max().item() for one, other in pairs)


GRID = {f"{case.__name__}-{preset}": partial(case, preset) for case in (trained, in_eval) for preset in PRESETS}
CASES: dict[int, dict[str, Callable[[], Any]]] = {2: {**GRID, "own_rows": own_rows}}
