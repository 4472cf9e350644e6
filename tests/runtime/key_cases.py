"""Calls whose arguments are alike but for what is easily overlooked, on real ranks; compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from call_cases import Net, rows, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.carried import planned_of

PRESETS = ("ddp", "fsdp", "tp")


@dataclass
class Batch:
    x: torch.Tensor


class Nested(Net):
    """Takes its rows in a list, in a dict, in a dataclass, or several at once."""

    def forward(self, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        taken = [v["x"][0] if isinstance(v, dict) else v.x if isinstance(v, Batch) else v for v in inputs]
        return super().forward(torch.cat(taken))


def both(kind: type[nn.Module], preset: str, examples: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A planned model, and the same one without a plan."""
    torch.manual_seed(3)
    alone = kind().double()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    return autopar.autoparallelize(kind().double(), examples, mesh, constraints=preset), alone


def nested_inputs_with_gradients(preset: str) -> dict[str, float]:
    """They have none in the call that was planned: how far their gradients are from one process's, and how many graphs
    there are in the end."""
    wraps: dict[str, Callable[[torch.Tensor], Any]] = {
        "dict": lambda x: {"x": [x]},
        "dataclass": Batch,
        "several": lambda x: x,
    }
    found = {}
    for name, wrapped in wraps.items():
        model, alone = both(Nested, preset, {"inputs": (wrapped(rows()), wrapped(rows(4)))})
        for _ in range(2):
            model(wrapped(rows()), wrapped(rows(4))).backward()
            mine, right = rows().requires_grad_(), rows().requires_grad_()
            for one, x in ((model, mine), (alone, right)):
                one(wrapped(x), wrapped(rows(4))).backward()
        found[name] = (whole(mine.grad) - whole(right.grad)).abs().max().item()
        found[f"{name}, graphs"] = len(planned_of(model).programs)
    return found


KINDS: tuple[Callable[[str], Any], ...] = (nested_inputs_with_gradients,)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{kind.__name__}-{preset}": partial(kind, preset) for kind in KINDS for preset in PRESETS}
}
