"""An embedding whose rows are sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from autopar.errors import LayoutError
from autopar.runtime.local.context import LocalContext


def embedding(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.embedding` on this rank's rows: ids of other ranks give zeros, so the ranks' outputs add up to the whole."""
    return _embedding(ctx, *args, **kwargs)


def _embedding(
    ctx: LocalContext,
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise LayoutError("embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split by rows")
    total = ctx.input_shapes[1][0]
    start, count = ctx.stretch(ctx.inputs[1], 0, total)
    if count == 0:  # more ranks than rows
        return weight.new_zeros((*input.shape, weight.shape[1])) + weight.sum(0)
    mine = (input >= start) & (input < start + count)
    padding = None
    if padding_idx is not None and start <= padding_idx % total < start + count:
        padding = padding_idx % total - start
    rows = F.embedding(torch.where(mine, input - start, 0), weight, padding)
    return rows.masked_fill(~mine.unsqueeze(-1), 0)
