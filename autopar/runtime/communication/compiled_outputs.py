"""Outputs of the forward of a `torch.autograd.Function`: as the functions here return them, gradients reach them in
compiled graphs too, and loops can write into them in place (`logits /= temperature`).

torch.compile of torch 2.11 returns the intermediate tensors of such a forward beside its outputs. Where an intermediate
tensor is the very object that is returned (`contiguous`, `to` or a wait that had nothing to do), the gradient goes to
the last of the two, and `backward` receives zeros for the output. torch 2.12 and newer leave such intermediates out.

Autograd forbids in-place writes to a view that was created inside such a forward: they would reach the base without
passing `backward`.
"""

from __future__ import annotations

import torch

from autopar.graph import storage_of

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # with it excluded, autograd records no views


def as_output(value: torch.Tensor, input_tensor: torch.Tensor | None = None) -> torch.Tensor:
    """`value` as a forward should return it: as a new object while a graph is compiled. Otherwise, where `value` is a
    view of an intermediate tensor and not of `input_tensor`, as an alias that autograd does not treat as a view."""
    if torch.compiler.is_compiling():
        return value.view_as(value)
    if input_tensor is None or not value._is_view() or storage_of(value) == storage_of(input_tensor):
        return value
    return as_no_view(value)


def as_no_view(value: torch.Tensor) -> torch.Tensor:
    """A new tensor object for `value`, which autograd does not treat as a view of it."""
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return value.view_as(value)
