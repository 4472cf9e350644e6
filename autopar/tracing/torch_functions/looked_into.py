"""Functions of `torch.nn` whose bodies are recorded, op by op, instead of the call.

They are Python code that passes the whole call to an active function mode, unless `has_torch_function` says that there
is none, as it does here. As one node, `multi_head_attention_forward` could be sharded only along the batch, and not at
all where it draws a dropout mask; `gaussian_nll_loss` could not run without data, since it asserts that no variance is
negative; a graph cannot hold the distance function of `triplet_margin_with_distance_loss`; and every rank would draw
the numbers of `gumbel_softmax` for all rows.
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
    """The call's result; `mode` sees the ops inside one by one."""
    names = "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"
    nobody = {name: lambda *tensors: False for name in names}
    with mode, attributes_set(F, **nobody), attributes_set(torch.overrides, **nobody):
        return func(*args, **kwargs)
