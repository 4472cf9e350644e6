"""Ranks that call a planned model inside `torch.autocast`: all of them, or only one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


def called(within: Callable[[], bool]) -> list[str]:
    """Warnings about autocast in a call of a planned model; `within` says whether autocast is on for this rank."""
    x = torch.randn(8, 16)
    model = autopar.autoparallelize(
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()), {"input": x}, init_device_mesh("cpu", (2,))
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=within()), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(x)
    return [str(one.message) for one in told if one.filename == __file__ and "autocast" in str(one.message)]


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        "none": lambda: called(lambda: False),
        "all": lambda: called(lambda: True),
        "one": lambda: called(lambda: dist.get_rank() == 1),
    }
}
