"""Hooks at the outputs of a call, where a backward pass enters its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor


def prepare_backward(outputs: Sequence[Any], inputs: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
    """Make gradients that enter at `outputs` plain tensors, and tell autograd which tensors of `state` have changed.

    An input that is returned unchanged belongs to the loop: its gradient enters no graph of the call.

    A loop that adds a penalty on parameters to the loss sums a plain tensor and a DTensor; the gradient is then a
    DTensor, but the graph works on plain tensors. Also, an op that writes into a DTensor increments the DTensor's
    version, not that of its local part, which the graph has saved: without this hook, an optimizer step between forward
    and backward would go unnoticed.
    """
    parameters = [(tensor, tensor._version) for tensor in state if isinstance(tensor, DTensor)]

    def enter(gradient: torch.Tensor) -> torch.Tensor | None:
        for tensor, version in parameters:
            if tensor._version != version:
                increment_version(tensor._local_tensor)
        return gradient.full_tensor() if isinstance(gradient, DTensor) else None

    for output in outputs:
        is_own = isinstance(output, torch.Tensor) and not any(output is tensor_passed for tensor_passed in inputs)
        if is_own and output.grad_fn is not None:
            output.register_hook(enter)
