"""What loops do with a part of a planned model, or beside it: on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from habit_cases import planned
from large_cases import refusal
from loop_cases import ROWS, Net, whole
from torch import nn


def submodule_loaded() -> float:
    """Plain tensors, read into one layer."""
    model = planned("fsdp")
    state = {
        name: torch.full(value.shape, 0.1, dtype=value.dtype)
        for name, value in nn.Linear(16, 32).double().state_dict().items()
    }
    model.get_submodule("up").load_state_dict(state)
    return max((whole(value) - 0.1).abs().max().item() for value in model.get_submodule("up").state_dict().values())


class Headed(nn.Module):
    """A head that shares a weight with the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net().double()
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.body.up.weight


def tied_outside() -> list[str]:
    """What the first call of a planned body says, and once the head shares the new weight."""
    model = Headed()
    model.body = planned("fsdp", model.body)
    told = refusal(lambda: model.body(ROWS))
    model.head.weight = model.body.up.weight
    return [told, refusal(lambda: model.body(ROWS))]


def formatted() -> list[str]:
    """A norm of clipped gradients as loops log it."""
    model = planned("fsdp")
    model(ROWS).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    part = model.get_parameter("up.weight").grad.norm()
    return [f"{norm.item():.3f}", f"{norm:.3f}", refusal(lambda: f"{part:.3f}"), f"{part}"]


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {case.__name__: case for case in (submodule_loaded, tied_outside, formatted)}
}
