"""Products and convolutions of tensors of several dtypes: torch's kernels reject them, but its meta kernels do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F

from autopar.tracing.targets import methods

_OF_ONE_DTYPE = {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.matmul, torch.mm, torch.mv, torch.addmm, torch.addmv),
    *methods("matmul", "__matmul__", "__rmatmul__", "mm", "mv", "addmm", "addmv"),
}


def check_dtypes(func: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError if a function gets tensors of several dtypes whose kernels take only one dtype.

    >>> check_dtypes(torch.mm, (torch.ones(2, 2), torch.ones(2, 2).half()), {})
    Traceback (most recent call last):
    RuntimeError: mm needs tensors of one dtype, and is given some of torch.float32 and of torch.float16
    """
    if func not in _OF_ONE_DTYPE:
        return
    tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
    dtypes = dict.fromkeys(str(tensor.dtype) for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    if len(dtypes) > 1 and not torch._C._is_any_autocast_enabled():  # autocast converts them to one dtype
        name = func.__name__.strip("_")
        raise RuntimeError(f"{name} needs tensors of one dtype, and is given some of {' and of '.join(dtypes)}")
