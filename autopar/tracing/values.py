"""Data-free values: tensors on the meta device, and the questions the recorder asks of them."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
META = torch.device("meta")
PLAIN = frozenset(
    {int, float, bool, str, type(None), complex, torch.dtype, torch.layout, torch.memory_format, type(Ellipsis)}
)


def value_of(tensor: Tensor) -> Tensor:
    """The value for an annotation: same storage and `requires_grad`, but without autograd graph."""
    value = tensor.detach()
    return value.requires_grad_() if tensor.requires_grad else value


def data_free_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A data-free tensor with the same shape, strides, dtype and `requires_grad`."""
    free = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device=META)
    return free.requires_grad_() if tensor.requires_grad else free


def result_like(tensor: Tensor) -> Tensor:
    """The same for a call's result: no autograd leaf, since the caller may write into it."""
    free = data_free_like(tensor)
    result = free.clone() if free.requires_grad else free
    return result if result.stride() == tensor.stride() else free


def with_own_identity(tensor: Tensor, inputs: list[Tensor]) -> Tensor:
    """A view of a tensor that an opaque call returned from its inputs: results need ids of their own."""
    return tensor.view_as(tensor) if any(tensor is t for t in inputs) else tensor


def has_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(has_tensor, value.values()))
    return isinstance(value, (tuple, list)) and any(map(has_tensor, value))


def makes_tensor(result: Any, inputs: list[Tensor]) -> bool:
    """Whether a result holds a tensor that is not among the inputs; `x.to(x.dtype)` is `x`, and becomes no node."""
    if isinstance(result, Tensor):
        return all(result is not t for t in inputs)
    return has_tensor(result)
