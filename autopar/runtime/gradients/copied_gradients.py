"""Gradients of a planned model can be copied (`copy.deepcopy`) and pickled (`torch.save`); copied parameters have none.

Gradients are views of a bucket's buffer, and the whole buffer would be copied or written with each of them. Besides,
torch (2.13) gives a DTensor the storage offset of its local tensor, takes a DTensor whose offset is not 0 for a tensor
with memory of its own, and fails. A deep copy of a plain parameter has no gradient, but one of a DTensor would have.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.gradients.dropped_gradients import GRADIENT


@functools.cache
def let_gradients_be_copied() -> None:
    """From now on, a DTensor that is a view of larger memory is copied by itself, and a parameter without its gradient.
    Once a process."""
    copied, reduced = DTensor.__deepcopy__, DTensor.__reduce_ex__

    @functools.wraps(copied)
    def __deepcopy__(tensor: DTensor, memo: dict[int, Any]) -> Any:
        if isinstance(tensor, nn.Parameter):
            gradient = tensor.grad
            GRADIENT.__set__(tensor, None)  # not `tensor.grad = None`, which drops waiting gradients
            try:
                return copied(tensor, memo)
            finally:
                GRADIENT.__set__(tensor, gradient)
        if not _lies_within(tensor):
            return copied(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = _apart(tensor)
        return memo[id(tensor)]

    @functools.wraps(reduced)
    def __reduce_ex__(tensor: DTensor, protocol: Any) -> Any:
        return reduced(_apart(tensor) if _lies_within(tensor) else tensor, protocol)

    for method in (__deepcopy__, __reduce_ex__):
        setattr(DTensor, method.__name__, method)


def _lies_within(tensor: DTensor) -> bool:
    plain = tensor.is_leaf and not tensor.requires_grad and tensor.grad is None
    local = tensor._local_tensor
    if not plain or type(local) is not torch.Tensor or local.layout != torch.strided:
        return False
    return local.untyped_storage().nbytes() > local.numel() * local.element_size()


def _apart(tensor: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.clone()
