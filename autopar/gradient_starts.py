"""Gradients that forward itself asks for: by which tensors of the graph, whole on every rank as they are read there.

`torch.autograd.grad` finds its way by the very tensor that it is asked about. In a graph that is split, others may
stand in its place: a part, or what was gathered of parts. So what gradients are asked by goes through a node that runs
whole, and all that reads it reads that node's result.

Fingerprints of graphs hold the path of this file, as that of `leaf_calls`.
"""

from __future__ import annotations

from typing import Any

import torch


def start_of_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor as an object of its own, which needs a gradient."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


RUN_WHOLE: tuple[Any, ...] = torch.autograd.grad, start_of_gradients
"""Of these no rank runs a part."""
