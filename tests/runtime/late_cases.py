"""Gradients that wait for a pass which does not reach their parameters, and hooks on these, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from large_cases import refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

PRESETS = ("ddp", "fsdp", "tp")
STEPS = 3


class Tasks(nn.Module):
    """A trunk with one head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 32)
        self.heads = nn.ModuleDict({task: nn.Linear(32, 4) for task in "ab"})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        loss: torch.Tensor = self.heads[task](self.trunk(x).relu()).square().mean()
        return loss


def built() -> nn.Module:
    torch.manual_seed(0)
    return Tasks().double()


def planned(preset: str, micro_batches: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return autopar.autoparallelize(
        built(), {"x": rows(0), "task": "a"}, mesh, constraints=preset, micro_batches=micro_batches
    )


def rows(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, tasks: str, *, by_hand: bool) -> None:
    """Steps of one micro-batch for each task in turn; all gradients together are clipped."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number, task in enumerate(tasks):
            waits = by_hand and isinstance(next(model.parameters()), DTensor) and number + 1 < len(tasks)
            with model.no_sync() if waits else contextlib.nullcontext():
                model(rows(10 * step + number), task=task).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def in_turn(preset: str, tasks: str, how: str) -> float:
    """The largest difference of a parameter from one process."""
    alone, model = built(), planned(preset, 1 if how == "no_sync" else len(tasks))
    train(alone, tasks, by_hand=False)
    train(model, tasks, by_hand=how == "no_sync")
    return difference(model, alone)


def difference(model: nn.Module, alone: nn.Module) -> float:
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((whole(p) - q).abs().max().item() for p, q in pairs)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def halved_once(alone: nn.Module) -> None:
    """Train in one process, halving some parameters' accumulated gradients before each step."""
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(STEPS):
        for number, task in enumerate("ab"):
            alone(rows(10 * step + number), task=task).backward()
        for name in ("trunk.weight", "heads.a.weight", "trunk.bias"):
            alone.get_parameter(name).grad.mul_(0.5)
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def hooks(preset: str, when: str) -> dict[str, Any]:
    """Hooks that halve the gradients of the trunk, and of a head that only the first micro-batch reads."""
    alone, model, calls = built(), built(), []

    def halve(gradient: torch.Tensor) -> torch.Tensor:
        calls.append("gradient")
        return gradient * 0.5

    def halve_behind(parameter: torch.Tensor) -> None:
        calls.append("behind")
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def hook(one: nn.Module) -> None:
        for name in ("trunk.weight", "heads.a.weight"):
            one.get_parameter(name).register_hook(halve)
        one.get_parameter("trunk.bias").register_post_accumulate_grad_hook(halve_behind)

    if when == "before":
        hook(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = autopar.autoparallelize(model, {"x": rows(0), "task": "a"}, mesh, constraints=preset)
    if when == "behind":
        hook(model)
    train(model, "ab", by_hand=True)
    told = list(calls)
    if preset == "tp":  # sharded gradients are there after each pass, as in one process
        hook(alone)
        train(alone, "ab", by_hand=False)
    else:
        halved_once(alone)
    return {"error": difference(model, alone), "gradient": told.count("gradient"), "behind": told.count("behind")}


def hooks_beside_kept(preset: str) -> list[list[int]]:
    """The passes in which post-accumulate hooks of a bias run if gradients are never zeroed, without and with a penalty
    in the loss.

    The first of every two passes leaves its gradients waiting; the penalty's gradient arrives at once.
    """
    found = []
    for penalty in (0.0, 0.1):
        model, passes = planned(preset, 1), []
        bias, number = model.get_parameter("trunk.bias"), 0
        bias.register_post_accumulate_grad_hook(lambda _: passes.append(number))  # noqa: B023
        bias.register_post_accumulate_grad_hook(lambda _: passes.append(number))  # noqa: B023
        for number in range(6):
            with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
                loss = model(rows(number), task="a")
            (loss + penalty * bias.square().sum() if penalty else loss).backward()
        found.append(passes)
    return found


def asked(preset: str, how: str) -> float:
    """`autograd.grad` between passes whose gradients wait, and within one: its results, and the summed gradients."""
    alone, model = built(), planned(preset, 1 if how == "no_sync" else 3)
    return max(
        (whole(a) - whole(b)).abs().max().item()
        for a, b in zip(asked_of(model, by_hand=how == "no_sync"), asked_of(alone, by_hand=False), strict=True)
    )


def asked_of(model: nn.Module, *, by_hand: bool) -> list[torch.Tensor]:
    names = ("trunk.weight", "trunk.bias", "heads.b.weight")
    found: list[torch.Tensor] = []
    for number, task in enumerate("aba"):
        with model.no_sync() if by_hand and number < 2 else contextlib.nullcontext():
            loss = model(rows(number), task=task)
            if task == "b":
                for some in (names[2:], names[:2], names):
                    found += torch.autograd.grad(loss, [model.get_parameter(one) for one in some], retain_graph=True)
            loss.backward()
        weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        halved = {name: value * 0.5 for name, value in weights.items()}
        loss = torch.func.functional_call(model, halved, (rows(9),), {"task": "a"})
        found += torch.autograd.grad(loss, [weights["trunk.weight"]])
        found += torch.autograd.grad(model(rows(8), task="b"), [model.get_parameter("trunk.weight")])
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(one is not None for one in gradients)
    return found + [one for one in gradients if one is not None]


class Wrapper(nn.Module):
    """A plain module around a model, with a layer of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.own = model, nn.Linear(2, 2)


def set_none(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def set_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def delete(model: nn.Module) -> None:
    for parameter in model.parameters():
        del parameter.grad


def set_one_none(model: nn.Module) -> None:
    model.get_parameter("trunk.weight").grad = None


DROPS: dict[str, Callable[[nn.Module], Any]] = {
    "None": set_none,
    "zeros": set_zeros,
    "del": delete,
    "None of one": set_one_none,
    "a wrapper": lambda model: Wrapper(model).zero_grad(),
    "a wrapper, not to None": lambda model: Wrapper(model).zero_grad(set_to_none=False),
    "a wrapper's optimizer": lambda model: torch.optim.SGD(Wrapper(model).parameters()).zero_grad(),
    "one layer": lambda model: model.get_submodule("trunk").zero_grad(),
    "any module": lambda model: nn.Module.zero_grad(model),
    "nothing, but a copy": copy.deepcopy,
}


def dropped(preset: str) -> dict[str, float]:
    """Gradients after those of an earlier pass were dropped while waiting; the largest difference for each way."""
    model, found = planned(preset, 1), {}
    for way, drop in DROPS.items():
        alone = built()
        model.zero_grad()
        for one in (alone, model):
            with model.no_sync():
                one(rows(1), task="a").backward()
            drop(one)
            one(rows(2), task="a").backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        got = [(p.grad, q.grad) for p, q in pairs if p.grad is not None or q.grad is not None]
        found[way] = max((whole(p) - q).abs().max().item() for p, q in got)
    return found


def set_meanwhile() -> list[str]:
    """Errors where `.grad` is set while gradients wait, with and without gradients of earlier passes."""
    model = planned("fsdp", 1)
    weight = model.get_parameter("trunk.weight")
    told = []
    for _ in range(2):
        model(rows(0), task="a").backward()
        with model.no_sync():
            model(rows(1), task="a").backward()
        told.append(refusal(lambda: setattr(weight, "grad", weight.grad * 0.5)))
        weight.grad = None
    return told


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        f"{tasks}, {how}, {preset}": functools.partial(in_turn, preset, tasks, how)
        for preset in PRESETS
        for tasks in ("ab", "aab", "aa")
        for how in ("no_sync", "counted")
    }
    | {
        f"hooks, {when}, {preset}": functools.partial(hooks, preset, when)
        for preset in PRESETS
        for when in ("before", "behind")
    }
    | {f"dropped, {preset}": functools.partial(dropped, preset) for preset in PRESETS}
    | {f"kept, {preset}": functools.partial(hooks_beside_kept, preset) for preset in PRESETS}
    | {"set meanwhile": set_meanwhile}
    | {
        f"asked, {how}, {preset}": functools.partial(asked, preset, how)
        for preset in PRESETS
        for how in ("no_sync", "counted")
    }
}
