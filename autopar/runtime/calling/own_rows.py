"""The rows of a call's outputs that belong to the rows that this rank has passed, and so to its own labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.runtime.calling.outputs import rows_of_rank
from autopar.runtime.stored.carried import planned_of


def own_rows(model: nn.Module, outputs: Any) -> Any:
    """This rank's rows of tensors that have the rows of the whole batch, as plain tensors.

        predicted = autopar.own_rows(model, output.logits).argmax(-1)
        right = (predicted == labels).sum()  # labels: of the rows that this rank has passed

    For plans with `inputs="local"`; with `inputs="global"` every rank has all rows, and the tensors are whole.
    `outputs`: a tensor that the planned model has returned, or a tree of them; scalars and other objects are returned
    unchanged. Called on every rank, since rows may be sent between ranks. Gradients through it are averaged over the
    ranks, as by DistributedDataParallel.

    Raises InputError for a tensor whose number of rows is not that of a batch that the model was called with.
    """
    planned = planned_of(model)
    rows = sorted({program.rows for program in planned.programs} - {0})  # none where every rank passes all

    def rows_of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if not rows:
            return value.full_tensor() if isinstance(value, DTensor) else value
        if planned.returns_own_rows and not isinstance(value, DTensor):
            return value
        if len(value) not in rows:
            raise InputError(
                f"a tensor of {len(value)} rows was given to own_rows, and the batches that the model was called with "
                f"have {' or '.join(map(str, rows))}: give it tensors that the model has returned, each once"
            )
        return rows_of_rank(value, planned.device_mesh)

    return pytree.tree_map(rows_of, outputs)
