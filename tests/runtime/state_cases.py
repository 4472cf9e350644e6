"""State with unusual memory layouts, and backward passes that end early, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from call_cases import Net, error, planned, rows, whole
from torch import nn
from torch._C._distributed_c10d import _get_work_registry_size  # private: collectives that nobody has waited for
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autopar


class Strided(Net):
    """Buffers with strides that leave gaps, and an expanded one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.randn(4, 16).t())
        self.register_buffer("alike", torch.full((1,), 3.0).expand(4))
        self.filter = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.turned: torch.Tensor
        self.alike: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (x @ self.turned + self.alike).to(self.filter.dtype) @ self.filter.t()
        return super().forward(x) + mixed.abs().square().mean()


def _strided(preset: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    alone = Strided().double()
    torch.manual_seed(1 + dist.get_rank())  # rank 0's values count
    model, mesh = Strided().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(model, {"x": rows()}, mesh, constraints=preset), alone


def strided_buffers(preset: str) -> float:
    model, alone = _strided(preset)
    return abs(whole(model(rows())).item() - alone(rows()).item())


def written_whole(preset: str) -> float:
    """The largest difference of what `export_full_state` writes, including complex parameters."""
    model, alone = _strided(preset)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, src=0)
        [path] = autopar.export_full_state(model, Path(folder[0]))
        written = safetensors.torch.load_file(path)
        dist.barrier()  # rank 0 removes its folder afterwards
    return max((written[name] - value).abs().max().item() for name, value in alone.state_dict().items())


def gradients_of_some(preset: str) -> float:
    """The number of collectives that nobody has waited for after backward passes that stop at the last layer."""
    deep = nn.Sequential(nn.Linear(16, 2048), *(nn.Linear(2048, 2048) for _ in range(5)))  # more than one bucket
    x, mesh = rows().float(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(deep, {"input": x}, mesh, constraints=preset)
    for _ in range(2):
        torch.autograd.grad(whole(model(x).square().mean()), [model.get_parameter("5.weight")])
    return float(_get_work_registry_size())


class Alike(Net):
    """Two parameters that get one gradient tensor, and a third whose gradient is an expanded element."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.common = nn.Parameter(torch.randn(16, 4)), nn.Parameter(torch.randn(16, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ (self.own + self.common)).square().mean() + self.shift.sum()


def one_gradient_of_several(preset: str) -> float:
    """Gradients accumulated and scaled in place, as clipping does."""
    torch.manual_seed(2)
    alone, mesh = Alike().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": rows()}, mesh, constraints=preset)
    for one in (alone, model):
        for _ in range(2):
            one(rows()).backward()
        for parameter in one.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
    return error(model, alone)


class Rebinding(Net):
    """Reassigns buffers: to another buffer's old tensor, to one that backward needs, to one that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(4))
        self.register_buffer("now", torch.ones(4))
        self.register_buffer("kinds", torch.randn(3, 4))
        self.before: torch.Tensor
        self.now: torch.Tensor
        self.kinds: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        result = self.down(torch.relu(self.up(x)))
        mean, old, row = result.detach().mean(0), self.kinds, self.kinds[1:]
        alike = torch.softmax(result @ self.kinds.t(), -1)
        self.before = self.now[:]
        self.now = 0.5 * self.now + mean
        self.kinds = 0.9 * self.kinds + alike.detach().mean(0).unsqueeze(1) * mean
        return (result - self.before).square().mean() + alike.square().mean(), old, row


def bound_anew(preset: str) -> float:
    """The largest difference of what three calls return and leave in the buffers."""
    torch.manual_seed(3)
    alone, mesh = Rebinding().double(), init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(copy.deepcopy(alone), {"x": rows()}, mesh, constraints=preset)
    worst = 0.0
    for count in (8, 6, 4):
        mine, right = model(rows(count)), alone(rows(count))
        mine[0].backward()
        right[0].backward()
        pairs = [*zip(mine, right, strict=True), *zip(model.buffers(), alone.buffers(), strict=True)]
        worst = max(worst, *((whole(a) - b).abs().max().item() for a, b in pairs))
    return max(worst, error(model, alone))


def vectors_of_one_process() -> str:
    """The error for a state of LBFGS from one process."""
    alone, model = Net().double(), planned("fsdp")
    optimizer = torch.optim.LBFGS(alone.parameters(), max_iter=2)

    def closure() -> float:
        loss = alone(rows())
        loss.backward()
        return float(loss)

    optimizer.step(closure)
    try:
        torch.optim.LBFGS(model.parameters(), max_iter=2).load_state_dict(optimizer.state_dict())
    except autopar.InputError as error:
        return str(error)
    return "no error"


class Fallible(Net):
    """Reads a table under changed modes; large ids raise an error."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found = self.table(ids) @ self.table.weight.t()
        return super().forward(x) + found.float().mean()


def error_inside(preset: str) -> list[bool]:
    """An error that the loop catches leaves the loop's modes as they were, and the next call works."""
    x, ids = rows(8).float(), torch.arange(8) % 4
    model = autopar.autoparallelize(
        Fallible(), {"x": x, "ids": ids}, init_device_mesh("cpu", (dist.get_world_size(),)), constraints=preset
    )
    before = model(x, ids)
    with contextlib.suppress(IndexError):
        model(x, ids + 9)
    modes = [torch.is_grad_enabled(), not torch.is_autocast_enabled("cpu"), (x @ x.t()).dtype == x.dtype]
    after = model(x, ids)
    return [*modes, after.requires_grad, torch.equal(before, after)]


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 4, bias=False))


def replayed(preset: str) -> list[bool]:
    """Random numbers are redrawn equally by a checkpoint around the call, by a restored state, and by a copy."""
    torch.manual_seed(3)
    mesh, x = init_device_mesh("cpu", (dist.get_world_size(),)), rows(8)
    planned = autopar.autoparallelize(Dropping().double(), {"input": x}, mesh, constraints=[preset, "output:* = R"])
    found = []
    for model in (planned, copy.deepcopy(planned)):
        weight = model[2].weight
        for reentrant in (True, False):
            output = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
            output.square().sum().backward()  # its sum of products with the last weight is twice the loss
            product = (whole(weight.grad) * whole(weight.detach())).sum()
            found.append(torch.allclose(product, 2 * output.detach().square().sum(), rtol=1e-12))
            model.zero_grad()
        state = torch.get_rng_state()
        first, second = model(x), model(x)
        torch.set_rng_state(state)
        with torch.random.fork_rng():
            found.append(torch.equal(first, model(x)))
        found.append(torch.equal(first, model(x)) and torch.equal(second, model(x)) and not torch.equal(first, second))
    return found


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {"vectors_of_one_process": vectors_of_one_process}
    | {
        f"{case.__name__}-{preset}": functools.partial(case, preset)
        for case in (
            error_inside,
            replayed,
            strided_buffers,
            written_whole,
            gradients_of_some,
            one_gradient_of_several,
            bound_anew,
        )
        for preset in ("ddp", "fsdp", "tp")
    }
}
