"""With `inputs="local"`: whether what a rank passes can be its rows of what the plan was made for.

Rows are dim 0 of every input that is no scalar. Of other data, a batch on dim 1 or a table that all ranks have, calls
of other shapes would be planned, and their numbers be those of another batch.
"""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.calls import Call, tensors_of_call
from autopar.runtime.programs import Programs
from autopar.user_warnings import warn


def check_rows(programs: Programs, model: nn.Module, passed: Call, whole: Call) -> None:
    """Look at a call that is not as planned: what this rank has `passed`, and the `whole` batch it would be rows of.

    Raises InputError where some inputs are rows of the planned ones and others are all of them; warns where the first
    call is of another batch than was planned.
    """
    if programs[0].plan.inputs != "local":
        return
    given, taken = ({n: tuple(t.shape) for n, t in tensors_of_call(model, *one).items()} for one in (passed, whole))
    inputs = programs.first.inputs.items()
    planned = {name: shape for name, (layout, shape) in inputs if not layout.is_replicated and name in given}
    entire = [name for name, shape in planned.items() if given[name] == shape != taken[name]]
    if entire and any(taken[name] == shape for name, shape in planned.items()):
        name = entire[0]
        raise InputError(
            f'with inputs="local" each rank passes its rows of every input, and {name!r} was passed whole: taken for '
            f"rows, it would be {taken[name]} in all, where the example is {planned[name]}. Pass this rank's part "
            '(autopar.local_batch), keep what has no rows as a buffer of the model, or plan with inputs="global"'
        )
    others = [name for name, shape in planned.items() if taken[name] != shape]
    if others and torch.is_grad_enabled() and not any(program.checked for program in programs):
        name = others[0]
        warn(
            f'with inputs="local" the rows of a batch are dim 0, and {name!r} of shape {given[name]} here is taken '
            f"for rows of {taken[name]} in all; the plan was made for {planned[name]}. If the batch is on another "
            'dim, put it first (batch_first=True), or plan with inputs="global"'
        )
