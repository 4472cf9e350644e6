"""Writing parameters between forward and backward is refused on real ranks where one process refuses it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

SCHEMES = ("ddp", "fsdp", "tp", "fsdp(recompute=full)")
WRITTEN: dict[str, tuple[str, ...]] = {
    "all": (),
    "a weight of a block": ("blocks.1.1.weight",),
    "a head": ("head.weight",),
    "what is whole": ("scale",),
    "a bias": ("head.bias",),
}


class Deep(nn.Module):
    """Blocks, a scale that every plan replicates, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16), nn.Tanh()) for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.tensor(1.5)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale).square().mean()


def built() -> nn.Module:
    torch.manual_seed(0)
    return Deep().double()


def step(parameters: Iterable[nn.Parameter], foreach: bool) -> None:
    torch.optim.AdamW(parameters, lr=0.1, foreach=foreach).step()


@torch.no_grad()
def add(parameters: Iterable[nn.Parameter]) -> None:
    for one in parameters:
        one.add_(1.0)


@torch.no_grad()
def add_to_list(parameters: Iterable[nn.Parameter]) -> None:
    torch._foreach_add_(list(parameters), 1.0)


WAYS: dict[str, Callable[[Iterable[nn.Parameter]], None]] = {
    "step": functools.partial(step, foreach=False),
    "step of lists": functools.partial(step, foreach=True),
    "in place": add,
    "in place, lists": add_to_list,
}


def outcome(model: nn.Module, write: Callable[[Iterable[nn.Parameter]], None], names: Iterable[str]) -> Any:
    """Gradients of a pass whose parameters were written before backward, or the error's type and message."""
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.load_state_dict(built().state_dict())
    model.zero_grad()
    model(x).backward()
    loss = model(x + 1)
    write([model.get_parameter(name) for name in names] or list(model.parameters()))
    try:
        loss.backward()
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients if g is not None])


def written(scheme: str) -> dict[str, Any]:
    """For each way and set of parameters: errors of one process and of the ranks, or how far gradients differ."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    example = {"x": torch.randn(8, 16, dtype=torch.float64)}
    alone, model = built(), autopar.autoparallelize(built(), example, mesh, constraints=scheme)
    found: dict[str, Any] = {}
    for way, write in WAYS.items():
        for what, names in WRITTEN.items():
            expected, got = outcome(alone, write, names), outcome(model, write, names)
            if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
                found[f"{what}, {way}"] = (expected - got).abs().max().item()
            else:
                found[f"{what}, {way}"] = [one if isinstance(one, list) else None for one in (expected, got)]
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {2: {scheme: functools.partial(written, scheme) for scheme in SCHEMES}}
