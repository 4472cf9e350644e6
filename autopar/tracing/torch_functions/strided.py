"""`as_strided` addresses a tensor's memory, which differs under a plan: a tensor that was moved has memory of its own.

A tensor without gaps is first made contiguous in its memory order (transposed, for example). Then the call means the
same wherever the tensor is, provided that it reads only the tensor's own elements.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import UntraceableError
from autopar.graph import EXAMPLE
from autopar.tracing.contents.without_kernel import as_numbers

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
_SIGNATURE = inspect.signature(lambda input, size, stride, storage_offset=None: None)


def as_strided(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Record the call; UntraceableError if it depends on memory other than the tensor's own elements."""
    bound = _SIGNATURE.bind(*args, **{"input" if name == "self" else name: value for name, value in kwargs.items()})
    tensor, *numbers = bound.args
    size, stride, *start = as_numbers(recorder, numbers)
    offset = start[0] if start else None
    last = (offset or 0) + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride(dim), tensor.shape[dim] == 1))
    lying = tensor.permute(order)
    fault = ""
    if not lying.is_contiguous():
        fault = "a tensor with gaps between its elements"
    elif offset is not None and _start(recorder, tensor):
        fault = "a part of another tensor, counted from the other's start"
    elif last >= tensor.numel() and 0 not in size:
        fault = "elements that are not the tensor's own"
    if fault:
        raise UntraceableError(
            f"{func.__name__} reads {fault}; under a plan a tensor may have memory of its own: give it a contiguous "
            "tensor with strides of its own, as .contiguous() makes it, or select the elements with indices, unfold "
            "or diagonal",
            where=recorder.where(),
        )
    recorder.reads_memory = True  # inputs with other strides need another trace
    if not tensor.is_contiguous():
        tensor = recorder.record(Tensor.contiguous, recorder.record(Tensor.permute, tensor, order))
    return recorder.record(func, tensor, size, stride, *start)


def _start(recorder: Recorder, tensor: Tensor) -> int:
    """A tensor's offset in its storage; an attribute or input may be part of another tensor."""
    node = recorder.nodes.get(id(tensor))
    example = None if node is None else node.meta.get(EXAMPLE)
    return int((recorder.attributes.original(tensor) if example is None else example).storage_offset())
