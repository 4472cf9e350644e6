"""Calls whose arguments differ only in subtle ways, on real ranks, compared with one process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from call_cases import Net, rows, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.stored.carried import planned_of

PRESETS = ("ddp", "fsdp", "tp")


@dataclass
class Batch:
    x: torch.Tensor


class Nested(Net):
    """Takes its rows in a list, in a dict, in a dataclass, or as several arguments."""

    def forward(self, *inputs: Any) -> torch.Tensor:  # type: ignore[override]
        taken = [v["x"][0] if isinstance(v, dict) else v.x if isinstance(v, Batch) else v for v in inputs]
        return super().forward(torch.cat(taken))


def both(kind: type[nn.Module], preset: str, examples: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A planned model, and the same model without a plan."""
    torch.manual_seed(3)
    alone = kind().double()
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2,))
    return autopar.autoparallelize(kind().double(), examples, mesh, constraints=preset), alone


def nested_inputs_with_gradients(preset: str) -> dict[str, float]:
    """Nested inputs that need gradients, unlike those of the planned call: the difference of their gradients from one
    process, and the number of graphs."""
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


class Asking(Net):
    """Asks for the strides of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 if x.is_contiguous() else 2 + (x.stride(0) == 1)
        return super().forward(x) * factor


class Comparing(Net):
    """Asks whether its two inputs are the same tensor, as attention does."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(q + k) * (2 if q is k else 1)


class Signed(Net):
    """Asks for the sign of a number."""

    def forward(self, x: torch.Tensor, number: float = 0.0) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * math.copysign(1.0, number)


class Indifferent(Net):
    """Asks for none of these."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (self.up(x).view(-1, 2, 16).mean(1) - target).square().mean()


def lying(count: int = 16) -> list[torch.Tensor]:
    """The same rows contiguous, transposed, and with a gap after each."""
    x = rows(count)
    return [x, x.t().contiguous().t(), torch.cat([x, x], 1)[:, :16]]


def called(
    kind: type[nn.Module], preset: str, calls: list[tuple[Any, ...]], inputs: str = "global"
) -> dict[str, float]:
    """The difference of calls, each made twice in turn, from one process, and the number of graphs."""
    names = list(inspect.signature(kind.forward).parameters)[1:]
    torch.manual_seed(3)
    alone = kind().double()
    torch.manual_seed(3)
    mesh, examples = init_device_mesh("cpu", (2,)), dict(zip(names, calls[0], strict=False))
    model = autopar.autoparallelize(kind().double(), examples, mesh, constraints=preset, inputs=inputs)
    worst = 0.0
    for call in calls * 2:
        parts = {id(v): v for v in call}
        if inputs == "local":
            parts = {key: v.chunk(2)[dist.get_rank()] for key, v in parts.items()}
        worst = max(worst, abs(model(*(parts[id(v)] for v in call)).item() - alone(*call).item()))
    return {"error": worst, "graphs": len(planned_of(model).programs)}


def strides(preset: str) -> list[dict[str, float]]:
    calls = [(x,) for x in lying()]
    return [called(Asking, preset, calls), called(Asking, preset, calls, "local")]


def one_tensor_twice(preset: str) -> list[dict[str, float]]:
    x, y = rows(), rows() + 1
    calls = [(x, y), (x, x), (y, x), (y, y)]
    return [called(Comparing, preset, calls), called(Comparing, preset, calls[1:], "local")]


def signs(preset: str) -> list[dict[str, float]]:
    return [called(Signed, preset, [(rows(), 0.0), (rows(), -0.0), (rows(),)])]


def not_asked_for(preset: str) -> list[dict[str, float]]:
    """One graph serves all, whichever call comes first."""
    first, *others = lying()
    calls = [(first, first), (first, first + 1), *((x, first) for x in others), *((x, x) for x in others)]
    found = [called(Indifferent, preset, calls), called(Indifferent, preset, calls[::-1])]
    with torch.no_grad():
        return [*found, called(Indifferent, preset, calls, "local")]


def planned_in_another_mode() -> list[int]:
    """The number of graphs after each call, where the first call in a mode is given one tensor twice."""
    x = rows(16)
    model, _ = both(Indifferent, "ddp", {"x": x, "target": x + 1})
    found = []
    with torch.no_grad():
        for call in ((x, x), (x, x + 1), (x, x)):
            model(*call)
            found.append(len(planned_of(model).programs))
    return found


KINDS: tuple[Callable[[str], Any], ...] = (
    nested_inputs_with_gradients,
    strides,
    one_tensor_twice,
    signs,
    not_asked_for,
)
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"{kind.__name__}-{preset}": partial(kind, preset) for kind in KINDS for preset in PRESETS}
    | {"planned_in_another_mode": planned_in_another_mode}
}
