"""Ranks that train models whose forward reads more than inputs and registered parameters and buffers."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from beside_one_process import worst_difference
from torch import nn
from torch.nn import functional as F

import autopar

PRESETS = ("tp", "ddp", "fsdp")


class Held(nn.Module):
    """Reads parameters through a list, through a tuple in a dict, and through an unregistered attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.tensor([0.5, 2.0] * 4))
        self.listed, self.named = [self.first.weight], {"pair": (self.first.bias, self.scale)}
        self.__dict__["weight"] = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias, scale = self.named["pair"]
        hidden = torch.relu(F.linear(x, self.listed[0], bias))
        return (F.linear(hidden, self.weight, self.second.bias) * scale).square().mean()


def held(preset: str) -> float:
    def before(model: nn.Module, step: int) -> None:
        model.train(step != 1)  # train and eval are separate traces
        if step == 2:
            model.scale.mul_(1.5)

    return worst_difference(Held, preset, before=before)


class Unregistered(nn.Module):
    """Has tensors that need gradients but are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.attribute = torch.randn(16, dtype=torch.float64, requires_grad=True)
        self.listed = [torch.randn(16, dtype=torch.float64, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.attribute + self.listed[0]).square().mean()


def unregistered(preset: str) -> float:
    def trained(model: nn.Module) -> list[torch.Tensor]:
        return [*model.parameters(), model.attribute, *model.listed]

    return worst_difference(Unregistered, preset, trained=trained)


class Arrays(nn.Module):
    """Passes NumPy arrays and scalars to torch functions in one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(16, 16)
        self.factors, self.chosen = np.linspace(0.5, 1.5, 16), np.array([3, 1, 2, 7])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](self.layer(x), self.factors, self.chosen).square().mean()


def _written(y: torch.Tensor, factors: Any, chosen: Any) -> torch.Tensor:
    made = torch.tensor(factors)
    made[2] = 5.0
    return y * made


def _decided(y: torch.Tensor, factors: Any, chosen: Any) -> torch.Tensor:
    return y * 2 if torch.as_tensor(factors).sum() > 3 else y


def _set(y: torch.Tensor, factors: Any, chosen: Any) -> torch.Tensor:
    made = torch.zeros_like(y)
    made[:, chosen] = y[:, chosen]
    return y + made


WAYS: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "tensor": lambda y, factors, chosen: y * torch.tensor(factors),
    "as_tensor": lambda y, factors, chosen: y * torch.as_tensor(factors, device=y.device, dtype=y.dtype),
    "asarray": lambda y, factors, chosen: y * torch.asarray(factors),
    "from_numpy": lambda y, factors, chosen: y * torch.from_numpy(np.sin(factors)),
    "new_tensor": lambda y, factors, chosen: y * y.new_tensor(factors),
    "list": lambda y, factors, chosen: y * torch.tensor([np.float64(number) for number in factors]),
    "index": lambda y, factors, chosen: y[chosen][:, None, chosen],
    "numbers": lambda y, factors, chosen: y * np.float32(2) + factors[3],
    "sizes": lambda y, factors, chosen: y.view(*np.array([8, 2, 8])).sum(np.int64(1)),
    "bounds": lambda y, factors, chosen: y[:, np.int64(1) : np.int64(9)],
    "named": lambda y, factors, chosen: torch.clamp(y, np.float32(-0.1), max=np.float32(0.1)),
    "written": _written,
    "decided": _decided,
    "set": _set,
}


class Kind(enum.Enum):
    PLAIN = 1
    DOUBLED = 2


@dataclass
class Slotted:
    __slots__ = ("weight",)
    weight: float


class Settings(nn.Module):
    """Reads an attribute that the loop changes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, nn.Linear(16, 16)
        self.kind, self.number, self.array = Kind.PLAIN, np.float32(1), np.ones(16)
        self.table, self.long, self.slotted, self.whole = np.ones((4, 16, 16)), [1.0] * 300, Slotted(1.0), 1
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.name == "kind" and self.kind is Kind.DOUBLED:
            y = y * 2
        elif self.name == "number":
            y = y * self.number
        elif self.name == "array":
            y = y * torch.tensor(self.array)
        elif self.name == "table":
            y = y @ torch.tensor(self.table).sum(0)
        elif self.name == "long":
            y = y * self.long[0]
        elif self.name == "slotted":
            y = y * self.slotted.weight
        elif self.name == "whole" and isinstance(self.whole, float):
            y = y * 3
        elif self.name == "mask" and self.mask is not None:
            y = y * self.mask
        return y.square().mean()


NAMES = ("kind", "number", "array", "table", "long", "slotted", "whole", "mask")


def changed(name: str, preset: str) -> float:
    def before(model: nn.Module, step: int) -> None:
        if step != 1:
            return
        model.kind, model.number, model.table, model.long = Kind.DOUBLED, np.float32(2), model.table * 2, [2.0] * 300
        model.array[3], model.slotted.weight, model.whole = 4, 2.0, 1.0
        model.mask = torch.full((16,), 3.0, dtype=torch.float64)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward reads", autopar.AutoparWarning)
        return worst_difference(lambda: Settings(name), preset, before=before)


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        **{f"held-{preset}": functools.partial(held, preset) for preset in PRESETS},
        **{f"unregistered-{preset}": functools.partial(unregistered, preset) for preset in PRESETS},
        **{
            f"{way}-{preset}": functools.partial(worst_difference, functools.partial(Arrays, way), preset, steps=2)
            for way in WAYS
            for preset in ("tp", "ddp")
        },
        **{f"changed {name}": functools.partial(changed, name, "tp") for name in NAMES},
    }
}
