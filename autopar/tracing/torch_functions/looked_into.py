"""Functions of `torch.nn` that are looked into: what they do inside are ops like any other.

They are Python made of torch functions, which hands itself to the mode as a whole; inside, it is told that nobody
listens, while the mode does. As one node, `multi_head_attention_forward` could split on the batch alone, and not at
all where it draws a dropout mask; `gaussian_nll_loss` could not run without data, since it asserts that no variance is
below zero; no graph shows the distance that `triplet_margin_with_distance_loss` is given; and the numbers of
`gumbel_softmax` would be drawn for all rows on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.tracing.patching import attributes_set

LOOKED_INTO = (
    F.multi_head_attention_forward,
    F.gaussian_nll_loss,
    F.triplet_margin_with_distance_loss,
    F.gumbel_softmax,
    torch.nn.init.uniform_,
    torch.nn.init.normal_,
    torch.nn.init.constant_,
    torch.nn.init.kaiming_uniform_,
)
CODES = {function.__code__ for function in LOOKED_INTO}


def look_into(mode: TorchFunctionMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call's result, whose own ops `mode` sees one by one."""
    names = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    nobody = {name: lambda *tensors: False for name in names}
    with mode, attributes_set(F, **nobody), attributes_set(torch.overrides, **nobody):
        return func(*args, **kwargs)
