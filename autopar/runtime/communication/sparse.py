"""Sparse inputs (torch.sparse_coo): a slice stays sparse, as the ops that read it expect; collectives send dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autopar.runtime.communication.convert import Stage


def moved(tensor: torch.Tensor, stage: Stage) -> torch.Tensor:
    """A sparse tensor after the forward actions of a stage, as a new object."""
    value = tensor.detach() if stage.dtype is None else tensor.detach().to(stage.dtype)
    for action in stage.forward:
        if value.is_sparse and action.kind == "slice":
            assert action.cut is not None
            indices = [torch.arange(start, start + n, device=value.device) for start, n in action.cut.runs(action.rank)]
            value = value.index_select(action.cut.dim, torch.cat(indices))  # a sparse tensor has no views
        else:
            value = action.apply(value.to_dense())
    return value
