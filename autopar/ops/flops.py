"""The total FLOPs of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from torch.utils.module_tracker import ModuleTracker


class _NoModules(ModuleTracker):
    """A `ModuleTracker` that tracks nothing: FLOPs are not counted by module."""

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _convolution_backward(
    grad_out_shape: Sequence[int],
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **others: Any,
) -> int:
    """FLOPs of a convolution's backward: each gradient takes as many multiplications as forward.

    Replaces the formula of torch 2.13, which ignores groups in the gradient of the weight.
    """
    forward: int = conv_flop_count(list(x_shape), list(w_shape), list(grad_out_shape), transposed)
    return forward * sum(output_mask[:2])


class TotalFlops(FlopCounterMode):
    """`FlopCounterMode` without counts by module, and with correct FLOPs for grouped convolutions.

    Counting by module sets hooks on inputs and outputs of modules, which fail where the call itself differentiates with
    respect to such a tensor.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping={torch.ops.aten.convolution_backward: _convolution_backward})
        self.mod_tracker = _NoModules()
