"""Gradients that are differentiated again, by the loop or in forward, on real ranks, compared with one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import second_derivative_models as models
import torch
import torch.distributed as dist
from beside_one_process import pair
from large_cases import refusal
from loop_cases import PRESETS, whole
from torch import nn
from torch.func import functional_call

import autopar

X = torch.linspace(-1, 1, 8 * 16, dtype=torch.float64).view(8, 16).sin()
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sin().square().mean()


def penalised(model: nn.Module, x: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """A gradient penalty, as for critics: its gradients by the parameters, and the model's gradient by the input."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(model, x).sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()
    return [*taken(model), slope]


def curved(model: nn.Module, x: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """Gradients by the parameters, and gradients of their sum of squares: a Hessian-vector product."""
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(call(model, x), parameters, create_graph=True)
    squares = [whole((one * one).sum()) for one in gradients]
    return [*gradients, *torch.autograd.grad(torch.stack(squares).sum(), parameters)]


def kept(model: nn.Module, x: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """The same with `backward(create_graph=True)`, which leaves gradients with a history in `.grad`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        call(model, x).backward(create_graph=True)
    gradients = taken(model)
    squares = torch.stack([whole(one).square().sum() for one in gradients])
    squares.sum().backward()
    return [*gradients, *taken(model)]


def adapted(model: nn.Module, x: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """Meta-learning: the gradients of the inner step contribute to those of the outer loss."""
    slow = dict(model.named_parameters())
    gradients = torch.autograd.grad(call(model, x), [*slow.values()], create_graph=True)
    fast = {name: one - 0.1 * gradient for (name, one), gradient in zip(slow.items(), gradients, strict=True)}
    outer = call(_with(model, fast), x + 1)
    return list(torch.autograd.grad(outer, [*slow.values()]))


def _with(model: nn.Module, values: dict[str, torch.Tensor]) -> Any:
    return lambda *args: functional_call(model, values, args)


def taken(model: nn.Module) -> list[torch.Tensor]:
    found = [one.grad for one in model.parameters() if one.grad is not None]
    for one in model.parameters():
        one.grad = None
    return found


def by_the_loop(name: str, preset: str, inputs: str, **options: Any) -> float:
    """The largest difference for each function above, relative to the largest value where that is above 1."""
    model, alone = pair(models.BY_THE_LOOP[name], {"x": X}, preset, inputs=inputs, optimizer="sgd", **options)

    def own(call: Call) -> Call:
        return lambda one, x: call(_rows(model, one), x) if inputs == "local" else call(one, x)

    def out(one: Any, x: torch.Tensor) -> torch.Tensor:
        return whole(one(x))

    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if inputs == "local" else slice(None)
    worst = 0.0
    for what, call in ((penalised, out), (curved, loss_of), (kept, loss_of), (adapted, loss_of)):
        mine, its = what(model, X[rows], own(call)), what(alone, X, call)
        if what is penalised:
            its[-1] = its[-1][rows]
        worst = max(worst, apart(mine, its))
    return worst


def _rows(model: nn.Module, one: Any) -> Any:
    return lambda x: autopar.own_rows(model, one(x))


def apart(mine: Sequence[torch.Tensor], its: Sequence[torch.Tensor]) -> float:
    pairs = [(whole(a).detach(), b.detach()) for a, b in zip(mine, its, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    return max((a - b).abs().max().item() / max(1.0, b.abs().max().item()) for a, b in pairs)


def by_forward(name: str, preset: str, inputs: str) -> float:
    target = X.cos()
    model, alone = pair(models.BY_FORWARD[name], {"x": X, "target": target}, preset, inputs=inputs, optimizer="sgd")
    rows = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if inputs == "local" else slice(None)
    worst = 0.0
    for step in range(2):
        loss, slope = model((X + step)[rows].clone(), target[rows])
        expected, its_slope = alone((X + step).clone(), target)
        mine = slope if inputs == "global" else autopar.own_rows(model, slope)
        loss.backward()
        expected.backward()
        for one in (model, alone):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        worst = max(worst, apart([loss, mine, *taken(model)], [expected, its_slope[rows], *taken(alone)]))
    return worst


def molecules(preset: str) -> float:
    """Trained on energies and forces, then evaluated."""
    batch = {
        "kinds": torch.arange(16) % 10,
        "positions": X[:, :6].reshape(16, 3),
        "edges": torch.stack([(torch.arange(40) * 7) % 16, torch.arange(40) % 16]),
        "molecules": torch.arange(16) // 4,
    }
    model, alone = pair(models.Molecules, {"batch": batch}, preset, optimizer="sgd")
    worst = 0.0
    for _ in range(2):
        for one in (model, alone):
            found = one({**batch, "positions": batch["positions"].clone()})
            (whole(found["energies"]).square().mean() + whole(found["forces"]).square().mean()).backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        worst = max(worst, apart(taken(model), taken(alone)))
    with torch.no_grad():
        results = [one.eval()({**batch, "positions": batch["positions"].clone()}) for one in (model, alone)]
    assert not any(value.requires_grad for value in results[0].values())
    return max(worst, apart([*results[0].values()], [*results[1].values()]))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.softmax = nn.Linear(16, 6), nn.LogSoftmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(self.last(x))


def refused() -> list[str]:
    """The errors for ops whose sharded versions have their own backward formula; also where only some gradients are
    asked for, on whose way autograd runs nothing else."""
    model, _ = pair(Normalised, {"x": X}, "ddp")
    told = [refusal(lambda: penalised(model, X, lambda one, x: whole(one(x))))]
    told.append(refusal(lambda: curved(model, X, loss_of)))
    other, _ = pair(Classes, {"x": X}, "activation:softmax = S1")
    return [*told, refusal(lambda: curved(other, X, loss_of))]


def with_micro_batches() -> float:
    """Each backward counts as one of the step's, whether it keeps a graph or not."""
    model, alone = pair(models.Critic, {"x": X[:4]}, "fsdp", micro_batches=2, optimizer="sgd")
    for one in (model, alone):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
            loss_of(one, X[:4]).backward(create_graph=True)
        loss_of(one, X[4:]).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = apart([one.grad for one in model.parameters()], [one.grad for one in alone.parameters()])
    optimizer.step()
    return found


RECOMPUTED = {"recomputed": partial(by_the_loop, "Critic", "fsdp(recompute=full, zero=3)", "global")}
CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        **{
            f"{name}-{preset}-{inputs}": partial(how, name, preset, inputs)
            for how, some in ((by_the_loop, models.BY_THE_LOOP), (by_forward, models.BY_FORWARD))
            for name in some
            for preset in PRESETS
            for inputs in ("global", "local")
            if inputs == "global" or preset != "tp"
        },
        **RECOMPUTED,
        **{f"molecules-{preset}": partial(molecules, preset) for preset in PRESETS},
        "refused": refused,
        "with_micro_batches": with_micro_batches,
    }
}
