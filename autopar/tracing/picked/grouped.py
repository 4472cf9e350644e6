"""The same number of picked rows in each sample, `x[visible].reshape(batch, 49, -1)`: a plain tensor again.

Masked autoencoders do this. In each sample the picked rows come first. If their number differs from that in the call,
the indices that are read exceed the last row: an error when the model runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.tracing.contents.deciding import known_or_leaf
from autopar.tracing.picked.picked_rows import PickedRows
from autopar.tracing.picked.trace_masks import TraceMasks
from autopar.tracing.pointwise import plain_name

Tensor = torch.Tensor


def record_view_by_sample(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The picked rows of each sample as a tensor; NotImplemented for any other call."""
    rows = args[0] if args else None
    if plain_name(func) not in ("view", "reshape") or kwargs or not isinstance(rows, PickedRows) or rows.row_dim:
        return NotImplemented
    view_sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    mask, inner = rows.row_mask.mask, rows.values.shape[1:]
    if mask.ndim < 2 or len(view_sizes) < 2 or not all(isinstance(size, int) for size in view_sizes):
        return NotImplemented
    samples, each, inner_sizes = view_sizes[0], view_sizes[1], list(view_sizes[2:])
    if inner_sizes.count(-1) == 1:
        inner_sizes[inner_sizes.index(-1)] = math.prod(inner) // max(
            math.prod(size for size in inner_sizes if size != -1), 1
        )
    if samples not in (-1, mask.shape[0]) or (samples == each == -1) or math.prod(inner_sizes) != math.prod(inner):
        return NotImplemented
    if each == -1:
        otherwise = known_or_leaf([rows.row_mask.node])
        raise trace_masks.recorder.unknown(
            f"{func.__name__}{tuple(view_sizes)} takes as many picked rows of each sample, and how many "
            "depends on data",
            mend=f"write their number in the place of -1, or {otherwise}",
        )
    with trace_masks.recorder.on():
        flat = mask.flatten(1)
        length = flat.shape[1]
        order = flat.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :each]
        order = torch.where((flat.sum(1) == each)[:, None], order, length)
        shown = rows.values.reshape(mask.shape[0], length, -1)
        gathered = shown.gather(1, order[..., None].expand(-1, -1, shown.shape[2]))
        return gathered.reshape(mask.shape[0], each, *inner_sizes)
