"""Collects measurements of all ranks; without a process group, those of this process alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Each figure's mean, the same on every rank."""
    return [statistics.fmean(column) for column in zip(*gathered(list(values)), strict=True)]
