"""What a loop has set for its own forward and backward, and planning must not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def hooks_of_loops_off() -> Iterator[None]:
    """For the duration, no anomaly mode and no hooks of saved tensors; as a decorator, for every call.

    `torch.autograd.set_detect_anomaly` asks each gradient whether it has a NaN, which those without data cannot tell:
    their backward would fail, and not be counted. `torch.utils.checkpoint` around the call of a model would count what
    a trace saves inside it, and `save_on_cpu` move it.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)  # of several the innermost are asked
    with torch.autograd.set_detect_anomaly(False), hooks:
        yield
