"""`tensor.data = value` on DTensors, as loops write it: weights put back (SAM), steps by hand, `vector_to_parameters`.

torch (2.13) only assigns to the wrapper: the local part, which holds the values, stays as it was, without an error.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.stored.parameters import dealt_out


@functools.cache
def assign_data() -> None:
    """From now on, an assignment to `data` gives a DTensor the value's local part. Once a process.

    A value in another layout is redistributed first; a plain one is dealt out with rank 0's values. So every rank must
    make the assignment.
    """
    DTensor.data = property(_read, _assign)  # type: ignore[assignment]


def _read(tensor: DTensor) -> torch.Tensor:
    data: torch.Tensor = torch._C.TensorBase.data.__get__(tensor)  # type: ignore[attr-defined]
    return data


def _assign(tensor: DTensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"data must be a tensor, not {type(value).__name__}")
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise InputError(
            f"data of a DTensor of shape {tuple(tensor.shape)} and {tensor.dtype} is set to a tensor of shape "
            f"{tuple(value.shape)} and {value.dtype}: change shapes and dtypes before autoparallelize"
        )
    with torch.no_grad():
        dealt = dealt_out(value, tensor)
        if not isinstance(dealt, DTensor):
            raise InputError("data of a DTensor is set to a tensor without data: set values, or call materialise")
        if dealt.placements != tensor.placements:
            dealt = dealt.redistribute(tensor.device_mesh, tensor.placements)
        tensor._local_tensor = dealt._local_tensor.detach()
