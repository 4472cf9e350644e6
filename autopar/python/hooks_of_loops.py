"""What a loop has set for its own forward and backward, and planning must not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def hooks_of_loops_off() -> Iterator[None]:
    """While inside, anomaly mode and hooks of saved tensors have no effect; usable as a decorator.

    `torch.autograd.set_detect_anomaly` looks for NaNs in every gradient, which data-free ones do not support: their
    backward would fail and its FLOPs not be counted. `torch.utils.checkpoint` around the call of a model would count
    the tensors that a trace saves, and `save_on_cpu` would move them.
    """
    with torch.autograd.set_detect_anomaly(False), _no_hooks():
        yield


def _no_hooks() -> AbstractContextManager[object]:
    """A context in which hooks of saved tensors leave them as they are.

    Only the innermost hooks are called, so neutral ones hide the others. They are set only if there are others, because
    `torch.func` raises if any are set, as it does inside a checkpoint in eager mode. The query is private: torch has no
    public one.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
