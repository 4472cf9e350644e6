"""`torch.nn.init` on parameters of a planned model, where torch (2.11 to 2.15) writes rows or elements one by one.

It fails there, or (`eye_`, which has `out=`) leaves the parameter with another shape. Here the whole is initialised,
and each rank takes its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import init

from autopar.runtime.stored.parameters import dealt_out

_NAMES = "orthogonal_", "eye_", "dirac_", "sparse_"


@functools.cache
def init_whole() -> None:
    """From now on, these functions initialise a DTensor with rank 0's values; every rank must call them. Once a
    process."""
    for name in _NAMES:
        setattr(init, name, _on_whole(getattr(init, name)))


def _on_whole(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(own)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or tensor.is_meta:
            return own(tensor, *args, **kwargs)
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
        with torch.no_grad():
            tensor.copy_(dealt_out(own(values, *args, **kwargs), tensor))
        return tensor

    return initialise
