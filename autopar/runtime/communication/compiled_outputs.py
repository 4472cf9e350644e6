"""What the forward of a `torch.autograd.Function` returns, so that its gradient also arrives in compiled graphs, and
its result can be written in place, as loops do with what a model returns (`logits /= temperature`).

torch.compile of torch 2.11 returns the intermediate tensors of such a forward beside its outputs. Where one of them is
the very object that is returned (`contiguous`, `to` or a wait that had nothing to do), the gradient goes to the last of
the two, and `backward` is handed zeros for the output. torch 2.12 and newer leave such intermediates out.

Autograd lets nobody write into a view that was made there: it would lead back to the base, past `backward`.
"""

from __future__ import annotations

import torch

from autopar.graph import storage_of

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # below it nothing is noted as a view


def as_output(value: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
    """`value`, as an object of its own where a graph is being compiled; and else, with what the forward was `given` in
    another form, as no view, unless it is one of that."""
    if torch.compiler.is_compiling():
        return value.view_as(value)
    if given is None or not value._is_view() or storage_of(value) == storage_of(given):
        return value
    return as_no_view(value)


def as_no_view(value: torch.Tensor) -> torch.Tensor:
    """`value` as an object of its own that autograd takes for no view of it."""
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return value.view_as(value)
