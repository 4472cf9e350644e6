"""What happens where a backward enters the graph of a call, at the outputs that the user has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor


def prepare_backward(outputs: Sequence[Any], inputs: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
    """Of a call's `outputs`, take gradients as the graph wants them; of its `state`, tell autograd what has changed.

    An input that is returned as it is belongs to the loop: its gradients enter no graph of the call.

    A loop that adds a penalty on parameters to the loss has a sum of a plain tensor and a DTensor, whose gradient is a
    DTensor: the graph works on plain ones. And ops that write into a DTensor count its versions, not those of its local
    part, which is what the graph has saved: without this, a step between forward and backward would go unnoticed.
    """
    parameters = [(tensor, tensor._version) for tensor in state if isinstance(tensor, DTensor)]

    def enter(gradient: torch.Tensor) -> torch.Tensor | None:
        for tensor, version in parameters:
            if tensor._version != version:
                increment_version(tensor._local_tensor)
        return gradient.full_tensor() if isinstance(gradient, DTensor) else None

    for output in outputs:
        is_own = isinstance(output, torch.Tensor) and not any(output is given for given in inputs)
        if is_own and output.grad_fn is not None:
            output.register_hook(enter)
