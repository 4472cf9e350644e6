"""Traces of the planned call and of other kinds of calls: how they are requested, and which can share a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.looks import repeated
from autopar.calls.state_rows import note_rows
from autopar.calls.states import states_in, without_states
from autopar.planning.call_arguments import is_without_loss, sorted_arguments
from autopar.planning.leaf_requests import split_requests
from autopar.planning.stages import Request, trace_for
from autopar.plans import Plan
from autopar.stopwatch import Stopwatch
from autopar.tracing import Traced
from autopar.tracing.leaves.loss_owners import modules_of


def request_beside(plan: Plan, request: Request) -> Request:
    """The request for other kinds of calls than a given plan's.

    It keeps the plan's leaves, which are part of its graph, and takes its other constraints and its budget, unless
    others are asked for.
    """
    leaves, _ = split_requests(plan.constraints)
    budget_bytes = request.memory_budget_bytes
    return replace(
        request,
        constraints=tuple(dict.fromkeys((*leaves, *(request.constraints or plan.constraints)))),
        memory_budget_bytes=plan.memory_budget_bytes if budget_bytes is None else budget_bytes,
    )


def trace_first(
    model: nn.Module,
    examples: Mapping[str, Any],
    constants: Mapping[str, Any] | None,
    request: Request,
    watch: Stopwatch,
) -> Traced:
    """The trace of a model, in which each input is treated as a tensor of its own.

    Where the same tensor is passed twice as an example, later calls probably do so too: a second trace checks whether
    this one is also valid for them.
    """
    traced = trace_for(model, examples, constants, request, watch)
    if repeated([leaf.example for leaf in traced.inputs.leaves]):
        together = trace_for(
            model, examples, constants, request, watch, same_inputs=True, set_again=traced.found_states.set_again
        )
        if together.does_as(traced):
            traced.other_keys.append(together.own_key)
    return traced


def trace_later(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    first: Traced,
    request: Request,
    watch: Stopwatch,
    entry: Entry,
    rows: Mapping[str, int],
) -> Traced:
    """The trace of a call of another kind than `first`, or of another method than the model's forward.

    `rows`: for its states, the dim that holds batch rows where that is known; -1 for inputs without rows.

    Where a tensor is passed twice, a trace that treats each input as its own tensor is preferred if it does the same:
    it is also valid for calls with different tensors.
    """
    if entry != FORWARD:  # the loss takes what forward returns, not this method's result
        request = replace(request, loss_fn=None)
    readable = {leaf.argument for leaf in first.inputs.leaves if leaf.known}
    own, states = without_states(kwargs), states_in(kwargs, modules_of(request.loss_fn))
    examples, constants = sorted_arguments(model, args, own, request.loss_fn, readable, entry)
    alone = is_without_loss(request.loss_fn, {*examples, *constants})
    call = model, examples, constants, request, watch
    again = partial(
        trace_for,
        *call,
        without_loss=alone,
        later=True,
        entry=entry,
        states=states,
        set_again=first.found_states.set_again,
    )
    traced = again(same_inputs=True)
    if traced.inputs.same and traced.does_as(apart := again()):
        traced = apart
    note_rows(traced.graph, rows)
    return traced


def plan_that_does(traced: Traced, earlier: Iterable[tuple[Any, Plan]]) -> Plan | None:
    """The plan of an earlier trace that computes the same as this one, or None."""
    return next((plan for earlier_trace, plan in earlier if traced.does_as(earlier_trace)), None)
