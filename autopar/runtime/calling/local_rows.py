"""Checks with `inputs="local"` that what a rank passes can be its rows of the planned batch.

Rows are dim 0 of every input that is not a scalar. Other data (a batch on dim 1, a table that all ranks have) would be
planned as calls of other shapes, with the results of another batch.

What belongs to one rank, the rows that it passes and those that it gets back, has the gradients of the rank's own loss,
as under DistributedDataParallel: the loss of all ranks together is the mean of their losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.calling.calls import Call, tensors_of_call
from autopar.runtime.gradients.scaled_gradients import with_scaled_gradient
from autopar.runtime.programs import Program, Programs
from autopar.user_warnings import warn


def asked_as_own(inputs: Sequence[Any], program: Program, ranks: int) -> list[Any]:
    """The inputs of a call, with gradients of this rank's rows scaled to those of its own loss, not of the mean."""
    layouts = (layout for layout, _ in program.inputs.values())
    return [
        with_scaled_gradient(value, ranks)
        if isinstance(value, torch.Tensor) and value.requires_grad and not layout.is_replicated
        else value
        for value, layout in zip(inputs, layouts, strict=True)
    ]


def check_rows(programs: Programs, model: nn.Module, passed: Call, whole: Call) -> None:
    """Check a call unlike the planned one: what this rank has `passed`, and the `whole` batch that it would be rows of.

    Raises InputError if some inputs are rows of the planned ones and others are whole; warns if the first call has
    other rows than were planned (another length alone is padding).
    """
    if programs[0].plan.inputs != "local":
        return
    tensors = (tensors_of_call(model.forward, *call_tensors) for call_tensors in (passed, whole))
    shapes, in_all = ({name: tuple(tensor.shape) for name, tensor in call_tensors.items()} for call_tensors in tensors)
    inputs = programs.first.inputs.items()
    planned = {name: shape for name, (layout, shape) in inputs if not layout.is_replicated and name in shapes}
    entire = [name for name, shape in planned.items() if shapes[name] == shape != in_all[name]]
    if entire and any(in_all[name] == shape for name, shape in planned.items()):
        name = entire[0]
        raise InputError(
            f'with inputs="local" each rank passes its rows of every input, and {name!r} was passed whole: taken for '
            f"rows, it would be {in_all[name]} in all, where the example is {planned[name]}. Pass this rank's part "
            '(autopar.local_batch), keep what has no rows as a buffer of the model, or plan with inputs="global"'
        )
    others = [name for name, shape in planned.items() if in_all[name][:1] != shape[:1]]
    if others and torch.is_grad_enabled() and not any(program.checked for program in programs):
        name = others[0]
        warn(
            f'with inputs="local" the rows of a batch are dim 0, and {name!r} of shape {shapes[name]} here is taken '
            f"for rows of {in_all[name]} in all; the plan was made for {planned[name]}. If the batch is on another "
            'dim, put it first (batch_first=True), or plan with inputs="global"'
        )
