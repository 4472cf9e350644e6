"""Tells all ranks alike whether gradients are finite on every rank, so that all can skip a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def gradients_are_finite(model: nn.Module) -> bool:
    """Whether no gradient of the model has a NaN or an infinity, on any rank; called on every rank.

    So a bad batch or an overflow costs one step, not the run:

        loss.backward()
        if autopar.gradients_are_finite(model):
            optimizer.step()
        optimizer.zero_grad()

    One reduction of one number. Buffers that the forward has changed (running statistics) stay as they are.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    nonempty = [part for part in parts if part.numel()]  # ragged shards may be empty
    finite = bool(torch.isfinite(nn.utils.get_total_norm(nonempty, float("inf")))) if nonempty else True
    if not dist.is_initialized():
        return finite
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    every = torch.tensor(int(finite), device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MIN)
    return bool(every.item())
