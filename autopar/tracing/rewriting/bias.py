"""The bias split: a product and an addition in place of a product with bias.

If the product is a partial sum over ranks, the bias must be added once, after the reduction. Linear, convolutions and
the addmm family are split; without a bias they are recorded as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from autopar.graph import BIAS_OF

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder


def _plus(recorder: Recorder, product: torch.Tensor, bias: Any) -> torch.Tensor:
    result: torch.Tensor = recorder.record(operator.add, product, bias)
    recorder.nodes[id(result)].meta[BIAS_OF] = recorder.nodes[id(product)]
    return result


def _linear(recorder: Recorder, input: Any, weight: Any, bias: Any = None) -> Any:
    return None if bias is None else _plus(recorder, recorder.record(F.linear, input, weight), bias)


def _convolution(function: Callable[..., Any], dims: int) -> Callable[..., Any]:
    def split(recorder: Recorder, input: Any, weight: Any, bias: Any = None, *arguments: Any, **kwargs: Any) -> Any:
        if bias is None:
            return None
        product = recorder.record(function, input, weight, None, *arguments, **kwargs)
        return _plus(recorder, product, recorder.record(torch.Tensor.view, bias, -1, *[1] * dims))

    return split


def _added_product(product: Callable[..., Any], summed: bool = False) -> Callable[..., Any]:
    """`beta * input + alpha * (a @ b)`, with the batch summed for addbmm."""

    def split(recorder: Recorder, input: Any, *operands: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> Any:
        operands += tuple(named.pop(n) for n in ("mat1", "batch1", "mat2", "batch2") if n in named)
        if len(operands) != 2 or named:
            return None  # an `out`, or a legacy form
        if not (operands[0].is_floating_point() or operands[0].is_complex()):
            return None  # for integers torch truncates `beta` and `alpha`
        result = recorder.record(product, *operands)
        if summed:
            result = recorder.record(torch.sum, result, 0)
        if alpha != 1:
            result = recorder.record(operator.mul, result, alpha)
        if beta == 0:
            return result
        return _plus(recorder, result, input if beta == 1 else recorder.record(operator.mul, input, beta))

    return split


SPLITS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.conv1d: _convolution(torch.conv1d, 1),
    torch.conv2d: _convolution(torch.conv2d, 2),
    torch.conv3d: _convolution(torch.conv3d, 3),
    torch.conv_transpose1d: _convolution(torch.conv_transpose1d, 1),
    torch.conv_transpose2d: _convolution(torch.conv_transpose2d, 2),
    torch.conv_transpose3d: _convolution(torch.conv_transpose3d, 3),
}
for _names, _split in (
    (("addmm",), _added_product(torch.mm)),
    (("addbmm",), _added_product(torch.bmm, summed=True)),
    (("baddbmm",), _added_product(torch.bmm)),
):
    for _name in _names:
        SPLITS[getattr(torch, _name)] = SPLITS[getattr(torch.Tensor, _name)] = _split

_LAYERS = (
    torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d,
)  # fmt: skip


def is_split_layer(module: torch.nn.Module, path: str) -> bool:
    """Whether the split applies to a layer's op, so that the layer cannot stay a leaf."""
    return isinstance(module, _LAYERS) and module.bias is not None
