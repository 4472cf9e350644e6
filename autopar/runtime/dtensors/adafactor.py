"""Adafactor for sharded parameters, which torch's own Adafactor cannot update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.runtime.dtensors.joined_parts import joined_placements


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` for DTensors and plain tensors, with the same arguments and the same results in each
    step.

    Squares are averaged on each rank's shards; only the averages (a row and a column for each matrix), norms and other
    single numbers are exchanged. The factors of the second moment are sharded like the dims of the parameter that they
    keep. `foreach` has no effect. Noam Shazeer and Mitchell Stern, Adafactor (2018), in the form of torch 2.13.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, -parameter.grad if group["maximize"] else parameter.grad, self.state, group)
        return loss


def _update(parameter: torch.Tensor, gradient: torch.Tensor, states: Any, group: dict[str, Any]) -> None:
    """One parameter's step; the names are those of torch."""
    state, factored = states[parameter], gradient.ndim > 1
    state.setdefault("step", torch.tensor(0.0))
    state["step"] += 1
    step, rate = state["step"].item(), float(group["lr"])
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(parameter.dtype).eps
    weight = step ** group["beta2_decay"]
    alpha = max(eps2, _number(parameter.norm(2)) / parameter.numel() ** 0.5) * min(rate, 1 / step**0.5)
    if group["weight_decay"]:
        parameter.mul_(1 - rate * group["weight_decay"])
    squared = gradient * gradient
    if factored:
        row = _averaged(state, "row_var", _mean(squared, -1), weight)
        column = _averaged(state, "col_var", _mean(squared, -2), weight)
        estimate = row * column / _mean(row, -2).clamp(min=eps1)
    else:
        estimate = _averaged(state, "variance", squared, weight)
    update = estimate.clamp(min=eps1 * eps1).rsqrt() * gradient
    norm = _number(update.norm(2)) / (update.numel() ** 0.5 * group["d"])
    parameter.add_(update, alpha=-alpha / max(1.0, norm))


def _averaged(state: dict[str, torch.Tensor], name: str, new: torch.Tensor, weight: float) -> torch.Tensor:
    """The running average `name` with `new` added; kept in the layout of `new`, whatever layout was loaded."""
    old = state.get(name)
    if old is None:
        old = torch.zeros_like(new)
    elif isinstance(new, DTensor) and not isinstance(old, DTensor):  # loaded from what one process saved
        old = distribute_tensor(old.to(new.device), new.device_mesh, new.placements)
    elif isinstance(old, DTensor) and isinstance(new, DTensor) and old.placements != new.placements:
        old = old.redistribute(new.device_mesh, new.placements)
    state[name] = old.lerp_(new.to(old.dtype), weight)
    return old


def _mean(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The mean over a dim, which is kept with length 1: whole if the dim was sharded, else sharded like the tensor."""
    total = tensor.sum(dim, keepdim=True)
    if isinstance(total, DTensor):
        total = total.redistribute(total.device_mesh, joined_placements(total.placements))
    return total / tensor.shape[dim]


def _number(tensor: torch.Tensor) -> float:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).item()
