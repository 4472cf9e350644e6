"""Which parameters the calls of a model train: the optimizer keeps their states whichever call runs.

A plan counts the states of all parameters that it or an earlier plan trains. Those that only a later plan trains are
added to the predictions of the earlier plans when the later one is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from autopar.cost.memory.states import state_bytes
from autopar.errors import InputError
from autopar.layout import Layout
from autopar.plans import Plan
from autopar.precision import Precision
from autopar.runtime.stored.parameters import tied_names
from autopar.sizes import show_bytes
from autopar.user_warnings import warn


class HasPlan(Protocol):
    """An object that runs a plan, such as a program."""

    plan: Plan


class Trained:
    """The trained parameters of one model: `names` has all names of each."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, plan: Plan, model: nn.Module, storage: Mapping[str, Layout], earlier: Sequence[HasPlan]) -> None:
        """Register another plan, of the model as it is called now. The predictions of `earlier` plans then count what
        this plan trains and no other does. Warns if this puts one above its budget; raises InputError for a parameter
        that was added after planning."""
        read = {parameter.name for parameter in plan.parameters}
        for names in tied_names(model):
            if names[0] not in storage and not read.isdisjoint(names):
                raise InputError(
                    f"the parameter '{names[0]}' was added after the model was planned, and the plan does not store "
                    "it: add parameters first, then autoparallelize the model"
                )
        read = read if torch.is_grad_enabled() else set()
        new = [
            names
            for names in tied_names(model)
            if not read.isdisjoint(names)
            and self.names.isdisjoint(names)
            and model.get_parameter(names[0]).requires_grad
        ]
        self.names.update(name for names in new for name in names)
        states: Counter[str] = Counter()
        precision = Precision.from_dict(plan.precision)
        for names in new if earlier else ():
            tensor = model.get_parameter(names[0])
            dtype = precision.parameter if precision.parameter and tensor.is_floating_point() else tensor.dtype
            states.update(
                state_bytes(plan.optimizer, precision, tuple(tensor.shape), dtype, storage[names[0]], plan.mesh_shape)
            )
        for program in earlier if states.total() else ():
            program.plan = _with_states(program.plan, states)
            budget = program.plan.memory_budget_bytes
            peak = program.plan.predicted.peak_bytes
            if budget is not None and peak - states.total() <= budget < peak:
                warn(
                    f"this call trains {len(new)} parameters that an earlier one does not, and the optimizer keeps "
                    f"{show_bytes(states.total())} of state for them: steps of the earlier call take "
                    f"{show_bytes(peak)} from now on, more than the budget of {show_bytes(budget)}"
                )


def _with_states(plan: Plan, states: Counter[str]) -> Plan:
    """The plan with these states added to its predicted peak, parts and moments."""
    predicted = plan.predicted
    moments = tuple(replace(moment, parts=dict(Counter(moment.parts) + states)) for moment in predicted.moments)
    parts, peak = dict(Counter(predicted.parts) + states), predicted.peak_bytes + states.total()
    return replace(plan, predicted=replace(predicted, peak_bytes=peak, parts=parts, moments=moments))
