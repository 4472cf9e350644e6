"""Ranks that split a loss over its classes: measured peaks of steps, and the prediction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from peak_cases import measured
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar

ROWS, CLASSES = 256, 4096
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": F.cross_entropy,
    "smoothed": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "apart": lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels),
    "apart, half": lambda logits, labels: F.nll_loss(logits.bfloat16().log_softmax(-1), labels),
}


class Classifier(nn.Module):
    """The logits are most of a step's memory."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.loss = nn.Linear(16, 16), nn.Linear(16, CLASSES), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(torch.relu(self.layer(x))), labels)


def peaks(loss: str, preset: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, 16), "labels": torch.arange(ROWS)}
    model: nn.Module = Classifier(LOSSES[loss])
    model = autopar.autoparallelize(
        model, batch, init_device_mesh("cpu", (2,)), constraints=preset, optimizer="sgd", time_limit=20
    )
    found = measured(model, batch, torch.optim.SGD(model.parameters()))
    split = ("cross_entropy", "log_softmax")
    found["split"] = [str(node.inputs[0]) for node in autopar.plan_of(model).nodes if node.local in split]
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{loss}, tp": functools.partial(peaks, loss, "tp") for loss in LOSSES}
    | {"plain, free": functools.partial(peaks, "plain", None)}
}
