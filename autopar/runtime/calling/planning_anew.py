"""A call of a new kind: every rank traces and plans it, with the parameters stored as they already are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.calls.entries import FORWARD, Entry, of_model
from autopar.errors import AutoparError, InputError
from autopar.runtime.calling.calls import Call, description, place_of, tensors_of_call
from autopar.runtime.calling.entered import as_built
from autopar.runtime.calling.local_rows import check_rows
from autopar.runtime.calling.states import check_rows_of_states, looks_of_set, take_over
from autopar.runtime.programs import Program
from autopar.runtime.ranks.agreement import agree
from autopar.runtime.stored.parameters import plain_parameters

if TYPE_CHECKING:
    from autopar.runtime.planned import Planned


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="autopar traces and plans each new kind of call; make one such call of the model before compiling it"
)
def plan_anew(
    planned: Planned, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], entry: Entry
) -> Program:
    """Trace and plan a call of a new kind, and return its program."""
    programs = planned.programs
    call_description = str(entry) + description(model, args, kwargs, reads_memory=programs.read_memory)
    agree(planned.rank.device, {"the shapes and arguments of this call": call_description})
    planned_class = type(model)
    model.__class__ = planned.user_class
    try:
        with plain_parameters(model), as_built(model):
            like = list(programs if entry == FORWARD else programs.of(entry))
            call = planned.whole_call(model, like, args, kwargs, entry)
            if entry == FORWARD:
                check_rows(programs, model, (args, kwargs), call)
            rows = {**programs.rows_of_states, **_without_rows(planned, entry.of(model), (args, kwargs), call)}
            call = call[0], {**call[1], **looks_of_set(programs, model)}
            earlier = [(program.traced, program.plan) for program in programs.of(entry)]
            traced, plan = planned.replan(model, *call, planned.storage, planned.trained.names, earlier, entry, rows)
            program = next((candidate for candidate in programs if candidate.plan is plan), None)
            if program is None:
                first = programs.first.traced.root  # not a copy, which would be kept alive
                known_states = {*programs.states}
                program = planned.add(traced if model is first else traced.of(first), plan, model)
                take_over(model, program, known_states, planned.device_mesh)
            program.traced.other_keys.append(program.traced.key(*call, model))
            return program
    except Exception as error:  # also what the user's code raises for such inputs
        if programs[0].plan.inputs == "local" and programs.states:
            check_rows_of_states(programs, tensors_of_call(entry.of(model), args, kwargs), error)
        raise _refused(planned, model, args, kwargs, entry, error) from error
    finally:
        model.__class__ = planned_class


def _without_rows(planned: Planned, called: Callable[..., Any], passed: Call, whole: Call) -> dict[str, int]:
    """Inputs without rows, as notes (-1) for the graph: those that the `whole` call has as this rank has `passed` them.

    Otherwise the plan would take every tensor of this rank for its rows, even a vector that all ranks have.
    """
    if planned.programs[0].plan.inputs == "global" or math.prod(planned.rank.mesh.shape) == 1:
        return {}
    tensors_passed, whole_tensors = (tensors_of_call(called, *call) for call in (passed, whole))
    return {name: -1 for name, tensor in tensors_passed.items() if tensor.shape == whole_tensors[name].shape}


def _refused(
    planned: Planned,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    entry: Entry,
    error: Exception,
) -> Exception:
    """The error of a call that cannot run: how it differs from a traced one, and why it cannot be planned itself."""
    earlier = planned.programs.of(entry)
    if not earlier:
        error.add_note(f"This happened in a call of {of_model(entry)}, which is planned separately.")
        return error
    try:
        earlier[-1].traced.bind(*planned.whole_call(model, earlier[-1:], args, kwargs, entry))
    except InputError as difference:
        place = error.where if isinstance(error, AutoparError) else place_of(error)
        reason = error.message if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
        return InputError(f"{difference.message}; planning such a call failed too: {reason}", where=place)
    error.add_note(
        "This happened in a call that is planned separately: its arguments match those of an earlier one, but the mode "
        "(train() or eval(), no_grad), which parameters are trained, or a value set on a module differs."
    )
    return error
