"""What training loops do besides calling the model, on real ranks, compared with the same loop in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar


class Net(nn.Module):
    """Two layers, and a running mean buffer that forward reassigns in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.down(torch.relu(self.up(x)))
        self.mean = 0.5 * self.mean + result.detach().mean(0)
        return ((result - self.mean) ** 2).mean()


@dataclass
class Result:
    loss: torch.Tensor
    rows: int


class Returning(Net):
    def forward(self, x: torch.Tensor) -> Result:  # type: ignore[override]
        return Result(super().forward(x), x.shape[0])


class Batched(Net):
    """Layers under `torch.vmap`, whose gradients must be communicated as elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: (self.down(torch.relu(self.up(row))) ** 2).sum())(x).mean()


class Cubic(Net):
    """Has a parameter of three dims, and one that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.cube, self.odd = nn.Parameter(torch.randn(6, 4, 8)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # squared below, since Adafactor scales rounding noise up to whole steps
        result = self.down(torch.relu(self.up(x)))
        return (result**2).mean() + (self.cube**2).mean() + (x[:, :4] @ self.odd.t()).square().mean()


class Clamped(Net):
    """Clamps and shrinks weights before reading them, as Gemma 3n does, masks them, as PixelCNN does, and averages
    some, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(32 * 16).view(32, 16) % 5 > 0).float())
        self.slow = nn.Linear(32, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-0.1, max=0.1).mul_(0.9)
        self.up.weight.data *= self.mask
        with torch.no_grad():
            self.down.bias.mul_(0.5)
            self.slow.weight.data = self.slow.weight.data * 0.9 + self.down.weight.data * (1 - 0.9)
            slow = self.slow(torch.relu(self.up(x)))
        return super().forward(x) + (slow * self.down.weight.sum()).square().mean()


class Counting(Net):
    """Weights rows by the size of their class and by sums over it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.down(torch.relu(self.up(x)))
        kind = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).int()
        count, held = torch.bincount(kind, minlength=5), kind.bincount(result[:, 0].detach(), minlength=4)
        return (result**2 * (0.1 * count[kind] + 0.1 * held[kind]).unsqueeze(1)).mean()


class Decorrelated(Net):
    """A loss on variances and covariances of hidden values, as in VICReg and Barlow Twins; rows are weighted, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        covered = torch.cov(hidden.T, aweights=torch.sigmoid(x[:, 0]))
        plain, correlated = torch.cov(hidden.T), self.down(hidden).T.corrcoef()
        return (covered.triu(1) + plain).square().mean() + correlated.square().mean()


ROWS = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
Prepare = Callable[[nn.Module], nn.Module]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(
    prepare: Prepare,
    loss: Callable[[nn.Module], torch.Tensor],
    kind: type[nn.Module] = Net,
    optimize: Callable[..., torch.optim.Optimizer] = SGD,
) -> list[torch.Tensor]:
    """Losses of three steps, then the parameters and buffers."""
    torch.manual_seed(3)
    model = prepare(kind().double())
    optimizer = optimize(model.parameters())
    losses = []
    for _ in range(3):
        found = loss(model)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(found.detach()))
    return [*losses, *(whole(value.detach()) for value in model.state_dict().values())]


def buffers_bound_anew(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS))


def hooks_of_the_model(prepare: Prepare) -> list[torch.Tensor]:
    """Hooks registered before and after planning: one changes the result, one reads its value."""
    seen: list[float] = []

    def hooked(model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        model = prepare(model)
        model.register_forward_hook(lambda module, args, output: output * 2)
        model.register_forward_hook(lambda module, args, output: seen.append(output.item()))
        return model

    found = trained(hooked, lambda model: model(ROWS if len(seen) < 2 else ROWS[:4]))
    return [*found, torch.tensor(seen)]


def numbers_of_parameters(prepare: Prepare) -> list[torch.Tensor]:
    """Norms of parameters, as loops log them and some optimizers use them."""

    def loss(model: nn.Module) -> torch.Tensor:
        norms = sum(parameter.detach().norm().item() for parameter in model.parameters())
        return model(ROWS) * norms

    return trained(prepare, loss)


def penalty_in_the_loop(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS) + 0.1 * sum(p.abs().sum() for p in model.parameters()))


def weights_of_a_plain_model(prepare: Prepare) -> list[torch.Tensor]:
    def loaded(model: nn.Module) -> nn.Module:
        model = prepare(model)
        # rank 0's numbers are used
        torch.manual_seed(dist.get_rank() + 5 if isinstance(model.up.weight, DTensor) else 5)
        model.load_state_dict(Net().double().state_dict())
        return model

    return trained(loaded, lambda model: model(ROWS))


def dataclass_returned(prepare: Prepare) -> list[torch.Tensor]:
    return trained(prepare, lambda model: model(ROWS).loss * model(ROWS).rows, Returning)


def adafactor(prepare: Prepare) -> list[torch.Tensor]:
    """Compared with torch's Adafactor on plain parameters; some have more than two dims."""

    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        listed = list(parameters)
        kind = autopar.Adafactor if isinstance(listed[0], DTensor) else torch.optim.Adafactor
        return kind(listed, lr=0.1, weight_decay=0.01)

    return trained(prepare, lambda model: model(ROWS), Cubic, made)


def step_before_backward(prepare: Prepare) -> list[torch.Tensor]:
    """Autograd refuses backward after the weights that forward read have been changed."""

    def loss(model: nn.Module) -> torch.Tensor:
        found = model(ROWS)
        with torch.no_grad():
            model.down.weight.mul_(2)
        try:
            found.backward()
        except RuntimeError as error:
            if "in place" not in str(error) and "inplace" not in str(error):
                raise
            model.zero_grad()  # the gradients made before the error depend on the plan
            return sum(whole(p).sum() for p in model.parameters())
        raise AssertionError("no error")

    return trained(prepare, loss)


PRESETS = ("ddp", "fsdp", "tp")
KINDS: tuple[Callable[[Prepare], list[torch.Tensor]], ...] = (
    buffers_bound_anew,
    hooks_of_the_model,
    numbers_of_parameters,
    penalty_in_the_loop,
    weights_of_a_plain_model,
    dataclass_returned,
    adafactor,
    step_before_backward,
)


def compared(kind: Callable[[Prepare], list[torch.Tensor]], preset: str) -> Callable[[], float]:
    """A case: the largest difference over all ranks between the loop on a planned model and on a plain one."""

    def planned(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return autopar.autoparallelize(model, {"x": ROWS}, mesh, constraints=preset)

    def case() -> float:
        pairs = zip(kind(planned), kind(lambda model: model), strict=True)
        worst = torch.stack([(mine - right).abs().max() for mine, right in pairs]).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    return case


def plainly(kind: type[nn.Module]) -> Callable[[Prepare], list[torch.Tensor]]:
    """The loop of a model of this kind that takes rows and returns its loss."""
    return lambda prepare: trained(prepare, lambda model: model(ROWS), kind)


def in_presets(
    *kinds: Callable[[Prepare], list[torch.Tensor]], **others: Callable[[Prepare], list[torch.Tensor]]
) -> dict[str, Callable[[], Any]]:
    """Each kind of loop under each preset, by name."""
    named = {kind.__name__: kind for kind in kinds} | others
    return {f"{name}-{preset}": compared(kind, preset) for name, kind in named.items() for preset in PRESETS}


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: in_presets(
        *KINDS,
        layers_under_vmap=plainly(Batched),
        weights_written_first=plainly(Clamped),
        counts_of_kinds=plainly(Counting),
        covariances=plainly(Decorrelated),
    )
}
