"""Calls that separate a tensor's values from its autograd history in place: `x.data = y`, `x.detach_()`.

They do not raise the tensor's version counter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import UntraceableError

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


def data_assigned(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> None:
    """`x.data = y` gives x other values but keeps its history, like a write into `x.data`."""
    tensor, values = args
    if values is tensor or (isinstance(tensor, torch.nn.Parameter) and tensor.dtype != values.dtype):
        recorder.record(func, *args)  # as in casting a module: `self.router.to(dtype)`
        return
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        raise UntraceableError(
            f"data of a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} is set in forward to a tensor of "
            f"shape {tuple(values.shape)} and {values.dtype}: give the result another name",
            where=recorder.where(),
        )
    recorder.record(Tensor.copy_, recorder.record(Tensor.detach, tensor), values)


def detached_in_place(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Tensor:
    """`x.detach_()`: from now on the name refers to the tensor without its history."""
    tensor: Tensor = args[0]
    if tensor.requires_grad:
        with recorder.pausing():
            before = recorder.node_of(tensor)
            node = recorder.without_gradient(tensor, before)
            tensor.detach_()
        recorder.nodes[id(tensor)] = node
    return tensor
