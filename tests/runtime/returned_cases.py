"""What loops do with the results of a planned model, on real ranks, compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from dtensor_support import JOINS_SPLIT_DIMS
from loop_cases import PRESETS, ROWS, Net, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Scores(Net):
    """Returns scores: as they are, transposed, as a view by heads, and as a contiguous copy by heads."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        scores = self.down(torch.relu(self.up(x)))
        heads = scores.view(-1, 2, 2).transpose(0, 1)
        return scores, (scores + 1).t(), heads + 1, heads.contiguous()


def pair(constraints: list[str]) -> list[nn.Module]:
    """A planned model, and the same model without a plan."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(Scores().double())
    mesh = init_device_mesh("cpu", (2,))
    return [autopar.autoparallelize(made[0], {"x": ROWS}, mesh, constraints=constraints), made[1]]


def written(preset: str) -> float:
    """Replicated outputs are modified in place, as loops apply temperatures and masks."""
    worst = 0.0
    for place in range(4):
        models = pair([preset, "output:* = R"])
        for model in models:
            scores = model(ROWS)[place]
            scores /= 0.7
            scores[0] = 0
            scores.square().sum().backward()
        grads = zip(models[0].parameters(), models[1].parameters(), strict=True)
        worst = max(worst, *((whole(a.grad) - b.grad).abs().max().item() for a, b in grads if b.grad is not None))
    return worst


def lying(preset: str) -> list[list[list[Any]]]:
    """Strides and contiguity of outputs, and sums over a view of the contiguous ones, also for one process."""
    found: list[list[list[Any]]] = []
    for outputs in zip(*(model(ROWS) for model in pair([preset])), strict=True):
        views = [
            whole(t.view(-1, 2).sum(1)).tolist() if JOINS_SPLIT_DIMS and t.is_contiguous() else None
            for t in map(torch.detach, outputs)
        ]
        found.append([[list(t.stride()), t.is_contiguous(), v] for t, v in zip(outputs, views, strict=True)])
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{case.__name__}-{preset}": partial(case, preset) for case in (written, lying) for preset in PRESETS}
}
