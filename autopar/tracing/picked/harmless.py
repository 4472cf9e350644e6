"""What rows that are not picked hold while an op runs on all rows: numbers whose results and derivatives are finite.

The gradients of these rows are zero, but zero times an infinite derivative is NaN, which would spoil the gradient of a
weight, summed over all rows. And an index or divisor out of range is an error in any row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.picked.picked_rows import ANY, FILLED, FINITE, HARMLESS, PickedRows, fill_unpicked
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor
_MOVING = {  # ops that move elements and compute none
    "view", "reshape", "flatten", "getitem", "transpose", "swapaxes", "permute", "unsqueeze", "squeeze", "cat",
    "concat", "stack", "chunk", "split", "unbind", "select", "narrow", "to", "type", "float", "double", "clone",
    "contiguous", "detach", "type_as", "cpu", "cuda",
}  # fmt: skip
_FINITE = {  # ops whose results and derivatives are finite for finite operands
    "add", "sub", "subtract", "rsub", "neg", "negative", "positive", "mul", "multiply", "linear", "matmul", "mm",
    "bmm", "conv1d", "conv2d", "conv3d", "relu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "leaky_relu",
    "elu", "selu", "celu", "hardtanh", "hardswish", "hardsigmoid", "relu6", "logsigmoid", "softsign", "abs", "clamp",
    "maximum", "minimum", "max", "min", "dropout", "sin", "cos", "square", "softmax", "log_softmax", "softmin",
    "logsumexp", "sum", "mean", "amax", "amin", "cumsum", "sort", "argsort", "topk", "argmax", "argmin", "glu",
    "layer_norm", "rms_norm", "group_norm", "any", "all", "eq", "ne", "lt", "le", "gt", "ge", "cross_entropy",
    "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits",
}  # fmt: skip
# Ops for which integers are indices.
_INDEXING = {
    "embedding", "gather", "one_hot", "index", "index_select", "cross_entropy", "nll_loss", "multi_margin_loss",
    "multilabel_margin_loss",
}  # fmt: skip


IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__idiv__")
VIEW_OR_COPY = {"view", "reshape", "flatten", "contiguous", "to", "type", "float", "double", "type_as"}
"""Ops that return a view or a copy, depending on strides: all rows may have other strides than the picked ones."""


def meaning(func: Any, args: Any) -> str:
    """The name of what a function does to its first argument: dividing by a number is multiplying."""
    name = plain_name(func).removeprefix("i") if func.__name__ in IN_PLACE else plain_name(func)
    by_number = len(args) == 2 and isinstance(args[0], PickedRows) and isinstance(args[1], (int, float))
    return "mul" if by_number and name in ("div", "true_divide") and "__r" not in func.__name__ else name


def harmless_operands(name: str, arguments: Any) -> Any:
    """The arguments of an op of this name, with all rows in place of picked ones."""
    return pytree.tree_map_only(PickedRows, lambda rows: _harmless(name, rows), arguments)


def unpicked_hold_after(name: str, operands: list[PickedRows]) -> int:
    """What the rows of an op's result that are not picked hold: FILLED, FINITE or ANY."""
    if name in _MOVING:
        return min(rows.unpicked_hold for rows in operands)
    return FINITE if name in _FINITE else ANY


def _harmless(name: str, rows: PickedRows) -> Tensor:
    """All rows as an operand of an op, with rows that are not picked filled if their contents may harm it."""
    values = rows.values
    if name in _MOVING or values.dtype == torch.bool:
        return values
    if values.is_floating_point() or values.is_complex():
        is_harmless = name in _INDEXING - _FINITE or rows.unpicked_hold >= (FINITE if name in _FINITE else FILLED)
        return values if is_harmless else fill_unpicked(rows, HARMLESS)
    if name in _INDEXING:
        return values if rows.unpicked_hold == FILLED else fill_unpicked(rows, 0)
    return values if name in _FINITE else fill_unpicked(rows, 1)
