"""`torch.autograd.set_detect_anomaly(True)` on planned models: it looks for NaN in gradients, which are DTensors."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding


@functools.cache
def let_anomalies_be_found() -> None:
    """From now on, torch can ask whether any element of a DTensor is true; it gathers the whole tensor for that."""
    register_sharding(torch.ops.aten._is_any_true.default)(_of_the_whole)


def _of_the_whole(values: Any) -> list[tuple[list[Any], list[Any]]]:
    return [([Replicate()], [Replicate()])]
