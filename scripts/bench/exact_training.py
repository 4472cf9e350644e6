"""The training loop of `exactness.py`: four micro-batches per step with different data, clipping, and a schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

MICRO_BATCHES = 4
CLIP, RATE, WARM_UP = 0.5, 1e-3, 10  # gradient norm, learning rate, steps of warm-up
Inputs = dict[str, torch.Tensor]


def varied(inputs: Inputs, number: int) -> Inputs:
    """Different data of the same shapes, by `number`: new random floats; tokens and labels permuted and shifted."""
    generator = torch.Generator().manual_seed(number)
    order = torch.randperm(next(iter(inputs.values())).shape[0], generator=generator)
    made = {}
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            made[name] = torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        else:
            made[name] = tensor[order].roll(number, -1) if tensor.ndim > 1 else tensor[order]
    return made


def rate(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / max(1, steps - WARM_UP)))


def train(model: nn.Module, inputs: Inputs, steps: int, after: Callable[[int], None] | None = None) -> list[float]:
    """Train, and return the losses of all micro-batches; `after` is called after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=steps))
    losses = []
    for step in range(steps):
        for part in range(MICRO_BATCHES):
            result = model(**varied(inputs, MICRO_BATCHES * step + part))
            loss: Any = result if isinstance(result, torch.Tensor) else result.loss
            (loss / MICRO_BATCHES).backward()
            losses.append(whole(loss.detach()).item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
