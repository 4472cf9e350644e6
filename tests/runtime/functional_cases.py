"""`torch.func` on planned models and real ranks: calls with other parameter values equal one process, and transforms
that collectives do not support are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from call_cases import built, planned, rows, whole
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

from autopar.errors import InputError


def inner_steps(preset: str) -> float:
    """Two gradient-descent steps on copies of the parameters, as in first-order meta-learning."""
    losses: list[list[float]] = []
    for model in (built(), planned(preset)):
        fast = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
        losses.append([])
        for _ in range(2):
            loss = functional_call(model, fast, (rows(),))
            gradients = torch.autograd.grad(loss, list(fast.values()))
            stepped = [v - 0.1 * g for v, g in zip(fast.values(), gradients, strict=True)]
            fast = {name: v.detach().requires_grad_() for name, v in zip(fast, stepped, strict=True)}
            losses[-1].append(whole(loss).item())
        losses[-1].append(whole(functional_call(model, fast, (rows(),))).item())
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def told(preset: str, call: Callable[[nn.Module], Any]) -> str:
    model = planned(preset)
    try:
        call(model)
    except InputError as error:
        return str(error)
    return "no error"


def _whole_values(model: nn.Module, *, trained: bool) -> Any:
    values = {name: torch.zeros(value.shape).double() for name, value in model.named_parameters()}
    return functional_call(model, {name: v.requires_grad_(trained) for name, v in values.items()}, (rows(),))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "whole_values": functools.partial(_whole_values, trained=True),
    "values_that_are_not_trained": functools.partial(_whole_values, trained=False),
    "transformed": lambda model: grad(lambda v: functional_call(model, v, (rows(),)))(dict(model.named_parameters())),
    "mapped": lambda model: vmap(model)(rows()[None]),
    "traced_by_jit": lambda model: torch.jit.trace(model, (rows(),)),
    "forward_mode": lambda model: jvp(model, (rows(),), (rows(),)),
}

CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {f"inner_steps-{preset}": functools.partial(inner_steps, preset) for preset in ("ddp", "fsdp", "tp")}
    | {name: functools.partial(told, "tp", call) for name, call in REFUSED.items()}
}
