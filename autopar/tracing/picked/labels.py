"""Labels that a mask picks from padded rows, concatenated, as CTC losses take them: how many there are depends on data.

The loss also takes padded rows with the same lengths, and these have a known size: there the picked labels of each row
come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.tracing.picked.picked_rows import PickedRows, RowMask, picked_rows_in
from autopar.tracing.picked.trace_masks import TraceMasks

Tensor = torch.Tensor
_SUMS = ("sum", torch.sum)
_CASTS = ("to", "long", "int")


def record_ctc_loss(trace_masks: TraceMasks, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss with padded rows in place of labels that a mask has picked; NotImplemented for any other call."""
    if func is not torch.nn.functional.ctc_loss:
        return NotImplemented
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if not isinstance(arguments.get("targets"), PickedRows) or len(picked_rows_in((args, kwargs))) > 1:
        return NotImplemented
    arguments["targets"] = padded(arguments["targets"], arguments["target_lengths"])
    with trace_masks.recorder.on():
        return func(*(arguments.pop(name) for name in names), *args[len(names) :], **arguments)


def padded(rows: PickedRows, lengths: object) -> Tensor:
    """The rows of labels, with the picked ones first in each row, and zeros behind. `lengths`: their numbers.

    Raises UnknownDataError if these are not the mask's own counts.
    """
    row_mask = rows.row_mask
    if row_mask.mask.ndim != 2 or rows.values.ndim != 1 or not _counts(row_mask, lengths):
        raise rows.unknown("ctc_loss")
    with row_mask.recorder.on():
        values, others = rows.values.view(row_mask.mask.shape), row_mask.mask.logical_not()
        order = others.to(torch.uint8).argsort(dim=1, stable=True)
        return values.gather(1, order).masked_fill(others.gather(1, order), 0)


def _counts(row_mask: RowMask, lengths: object) -> bool:
    """Whether lengths are the sums of the mask's rows, possibly in another dtype."""
    node = row_mask.recorder.nodes.get(id(lengths))
    while node is not None and node.target in _CASTS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node is None or node.target not in _SUMS or not row_mask.is_made_by(node.args[0]):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return dim in (1, -1, (1,), (-1,), [1], [-1])
