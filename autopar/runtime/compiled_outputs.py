"""What the forward of a `torch.autograd.Function` returns, so that its gradient also arrives in compiled graphs.

torch.compile of torch 2.11 returns the intermediate tensors of such a forward beside its outputs. Where one of them is
the very object that is returned (`contiguous`, `to` or a wait that had nothing to do), the gradient goes to the last of
the two, and `backward` is handed zeros for the output. torch 2.12 and newer leave such intermediates out.
"""

from __future__ import annotations

import torch


def as_output(value: torch.Tensor) -> torch.Tensor:
    """`value`, as an object of its own where a graph is being compiled."""
    return value.view_as(value) if torch.compiler.is_compiling() else value
