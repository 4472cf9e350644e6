"""Calls of submodules and other methods of a planned model, on real ranks, compared with one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside_one_process import pair
from loop_cases import PRESETS, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import InputError

X = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8).sin()
CODES = torch.linspace(-2, 2, 32, dtype=torch.float64).view(8, 4).cos()


class Autoencoder(nn.Module):
    """`decode` only calls modules; `encode` also reads a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.code = nn.Linear(8, 16), nn.Linear(16, 4)
        self.up, self.out = nn.Linear(4, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((4,), 0.7))
        self.power = 2

    def encode(self, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
        return self.code(torch.relu(self.down(x))) * self.scale * times

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.up(code)))

    def likeness(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.encode(x), self.encode(other), self.scale.exp().sum()

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        lost = (self.decode(self.encode(x)) - x).abs() ** self.power
        return lost.mean() if weight is None else (lost * weight).mean()


def apart(planned: nn.Module, alone: nn.Module) -> float:
    """The largest difference of gradients."""
    pairs = zip(planned.parameters(), alone.parameters(), strict=True)
    return max((whole(a.grad) - b.grad).abs().max().item() for a, b in pairs if b.grad is not None)


def training(preset: str) -> float:
    """A loss of several calls: submodules, a method that calls modules, a registered method, and the model itself."""
    models = pair(Autoencoder, {"x": X}, preset)
    autopar.register_forward_method(models[0], "encode")
    worst = 0.0
    for _ in range(2):
        for model in models:
            code = model.encode(X, times=0.5)
            apart_again = F.mse_loss(model.encode(X + 1), code.roll(1, 0))
            (apart_again + model.decode(CODES).square().mean() + model.up(code).sum() * 0.1 + model(X)).backward()
        worst = max(worst, apart(*models))
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    return worst


def changed(preset: str) -> float:
    """Calls in eval mode, with other shapes, with attributes that the loop changed, and without gradients."""
    planned, alone = pair(Autoencoder, {"x": X}, preset)
    autopar.register_forward_method(planned, "likeness")
    worst = 0.0
    for model in (planned, alone):
        model.eval()
    for rows in (8, 6):
        with torch.no_grad():
            found, expected = (model.likeness(X[:rows], X[:rows]) for model in (planned, alone))
            for one, other in zip(found, expected, strict=True):
                worst = max(worst, (one - other).abs().max().item())
            worst = max(worst, (planned.down(X[:rows]) - alone.down(X[:rows])).abs().max().item())
    planned.power = alone.power = 3
    return max(worst, (planned(X) - alone(X)).abs().item())


def hooked(preset: str) -> list[float]:
    """Hooks of a submodule run once in each call of it, with plain tensors."""
    seen: list[bool] = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.device.type != "meta" and type(output) is torch.Tensor)
        return output * 2

    model, alone = Autoencoder().double(), Autoencoder().double()
    alone.load_state_dict(model.state_dict())
    for one in (model, alone):
        one.up.register_forward_hook(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the hook does not run in calls of the model
        autopar.autoparallelize(model, {"x": X}, init_device_mesh("cpu", (dist.get_world_size(),)), constraints=preset)
        seen.clear()
        apart = [(model.up(CODES) - alone.up(CODES)).abs().max().item() for _ in range(2)]
        apart.append((model(X) - alone(X)).abs().item())
    return [max(apart), sum(seen), len(seen)]


def copied(preset: str) -> list[Any]:
    """A copy calls its own modules; a copy of a submodule alone has no plan."""
    planned, alone = pair(Autoencoder, {"x": X}, preset)
    autopar.register_forward_method(planned, "encode")
    planned.encode(X)
    kept = copy.deepcopy(planned)
    with torch.no_grad():
        for parameter in planned.parameters():
            parameter.add_(1)
    pairs = (kept.encode(X), alone.encode(X)), (kept.up(CODES), alone.up(CODES))
    worst = max((one - other).abs().max().item() for one, other in pairs)
    try:
        copy.deepcopy(planned.up)(CODES)
    except InputError as error:
        return [worst, error.message]
    return [worst, ""]


def refused(preset: str) -> list[str]:
    """The errors of registering what cannot be registered."""
    planned, alone = pair(Autoencoder, {"x": X}, preset)
    told = []
    for module, name in ((planned, "encod"), (planned, "forward"), (alone, "encode"), (planned.up, "extra_rep")):
        try:
            autopar.register_forward_method(module, name)
        except InputError as error:
            told.append(error.message)
    return told


def accumulated(preset: str) -> float:
    """Calls of submodules in both backward passes of a step with two micro-batches."""
    planned, alone = pair(Autoencoder, {"x": X}, preset, micro_batches=2)
    for model in (planned, alone):
        (model(X[:4]) + model.decode(CODES).square().mean()).backward()
        (model(X[4:]) + model.decode(CODES + 1).square().mean()).backward()
    return apart(planned, alone)


def own_rows(preset: str) -> list[float]:
    """With its own rows, each rank's loss counts as in DistributedDataParallel: gradients are those of the mean."""
    planned, alone = pair(Autoencoder, {"x": X}, preset, inputs="local")
    autopar.register_forward_method(planned, "likeness")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = [slice(8 // ranks * r, 8 // ranks * (r + 1)) for r in range(ranks)]

    def loss(model: Autoencoder, mine: slice) -> torch.Tensor:
        one, other, scale = model.likeness(X[mine], X[mine] + 1)
        scores = one @ other.T * scale
        spread = model.decode(CODES[mine]).std()
        return F.cross_entropy(scores, torch.arange(len(scores))) + spread * (1 + mine.start)

    found = loss(planned, rows[rank])
    found.backward()
    sum(loss(alone, mine) / ranks for mine in rows).backward()  # type: ignore[union-attr]
    off = (found - loss(alone, rows[rank])).abs().item()
    weight = torch.linspace(0, 1, 64, dtype=torch.float64).view(8, 8)
    off = max(off, (planned(X[rows[rank]], weight[rows[rank]]) - alone(X, weight)).abs().item())
    return [off, apart(planned, alone)]


class Scaled(nn.Module):
    """Returns rows, and a scalar that is equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.scale.exp()


def scale() -> float:
    """A scalar that the model returns, used in each rank's own loss."""
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(Scaled().double())
    planned, alone = made
    autopar.autoparallelize(planned, {"x": X}, init_device_mesh("cpu", (dist.get_world_size(),)), inputs="local")
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    rows, factor = planned(X[mine])
    (autopar.own_rows(planned, rows) * factor).square().mean().backward()
    rows, factor = alone(X)
    (rows * factor).square().mean().backward()
    return apart(planned, alone)


class Stack(nn.Module):
    """More modules than the number of graphs that the cache keeps for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))
        self.table = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x + self.table.weight.sum()).mean()

    def start(self) -> torch.Tensor:
        return self.table.weight.sum(0)


def many() -> list[Any]:
    """Each module is planned only once, however many there are, and so is a method without inputs."""
    torch.manual_seed(3)
    planned, alone = Stack().double(), Stack().double()
    alone.load_state_dict(planned.state_dict())
    autopar.autoparallelize(planned, {"x": X}, init_device_mesh("cpu", (dist.get_world_size(),)), constraints="fsdp")
    autopar.register_forward_method(planned, "start")
    numbers = set()
    worst = (planned.start() - alone.start()).abs().max().item()
    for _ in range(2):
        x, y = X, X
        for layer, other in zip(planned.layers, alone.layers, strict=True):
            x, y = layer(x), other(y)
        worst = max(worst, (x - y).abs().max().item())
        numbers.add(len(planned._autopar.programs))  # type: ignore[union-attr, arg-type]
    return [worst, len(numbers)]


GRID = {
    f"{case.__name__}-{preset}": partial(case, preset)
    for case in (training, changed, hooked, copied, refused, accumulated, own_rows)
    for preset in PRESETS
}
CASES: dict[int, dict[str, Callable[[], Any]]] = {2: {**GRID, "scale": scale, "many": many}}
