"""Masks and tables that forward derives from shapes once and caches, on real ranks, compared with one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from beside_one_process import pair
from loop_cases import whole
from torch import nn

import autopar
from autopar.tracing.attempt import Attempt

X = torch.linspace(-1, 1, 8 * 6 * 8, dtype=torch.float64).view(8, 6, 8).sin()


class Attention(nn.Module):
    """Caches a mask by length in a dict, positions in a growing table, and rotations keyed by length."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.masks = nn.Linear(8, 8), nn.Linear(8, 16), dict[int, torch.Tensor]()
        self.positions, self.length, self.aux = torch.zeros(2, 8), 0, torch.zeros(())
        self.register_buffer("cos", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length not in self.masks:
            self.masks[length] = x.new_full((length, length), -1e9).triu(1)
        if len(self.positions) < length or self.positions.dtype != x.dtype:
            self.positions = torch.arange(8 * length).view(length, 8).to(x) / 100
        if self.cos is None or self.length < length:
            self.length, self.cos = length, torch.arange(length).to(x).cos()[:, None]
        self.aux = 0.0
        for _ in range(2):
            k, v = self.kv((x + self.positions[:length]) * self.cos[:length]).chunk(2, -1)
            x = x + ((self.q(x) @ k.transpose(1, 2)) + self.masks[length]).softmax(-1) @ v
            self.aux = self.aux + x.abs().mean()
        return x.square().mean() + self.aux


def trained(preset: str) -> list[Any]:
    """Two rounds of training and evaluation at two lengths: the difference, the traces in each round, the warnings."""
    traces, run, worst, counted = list[Attempt](), Attempt.run, 0.0, list[int]()
    counting = mock.patch.object(Attempt, "run", lambda self: traces.append(self) or run(self))
    with warnings.catch_warnings(record=True) as found, counting:
        warnings.simplefilter("always")
        planned, alone = pair(Attention, {"x": X}, preset)
        for _ in range(2):
            for x in (X, X + 1, X[:, :4], X.repeat(1, 2, 1)):
                losses = [model.train()(x) for model in (planned, alone)]
                for loss in losses:
                    loss.backward()
                worst = max(worst, (losses[0] - losses[1]).abs().item())
                for mine, its in zip(planned.parameters(), alone.parameters(), strict=True):
                    worst = max(worst, (whole(mine.grad) - its.grad).abs().max().item())
                    mine.grad = its.grad = None
                with torch.no_grad():
                    worst = max(worst, (planned.eval()(x) - alone.eval()(x)).abs().item())
            counted.append(len(traces) - sum(counted))
    told = [str(one.message) for one in found if issubclass(one.category, autopar.AutoparWarning)]
    return [worst, counted, told]


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {preset: partial(trained, preset) for preset in ("ddp", "fsdp", "tp")}
}
