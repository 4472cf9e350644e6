"""Where forward itself calls `torch.autograd.grad`: a node that marks each tensor it differentiates with respect to.

`torch.autograd.grad` needs the very tensor object that the differentiated computation has read. Under a plan, other
objects may take its place: a shard, or a tensor gathered from shards. Therefore such a tensor passes through the node
`start_of_gradients`, which every rank runs whole, and everything that reads the tensor reads this node's result.

As with `leaf_calls`, the path of this file is part of the fingerprints of graphs: moving it invalidates saved plans.
"""

from __future__ import annotations

from typing import Any

import torch


def start_of_gradients(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a new tensor object that requires a gradient."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


RUN_WHOLE: tuple[Any, ...] = torch.autograd.grad, start_of_gradients
"""Functions that are never sharded: every rank runs the whole op."""
