"""Access to what a planned model carries, for code that has only the model."""

from __future__ import annotations

from torch import nn

from autopar.errors import InputError
from autopar.plans import Plan
from autopar.runtime.planned import Planned
from autopar.runtime.stored.model_class import ATTRIBUTE


def planned_of(model: nn.Module) -> Planned:
    """The `Planned` that a planned model carries; raises InputError for a model without a plan."""
    planned = getattr(model, ATTRIBUTE, None)
    if planned is None:
        raise InputError(f"this {type(model).__name__} has no plan: pass it through autoparallelize first")
    assert isinstance(planned, Planned)
    return planned


def plan_of(model: nn.Module) -> Plan:
    """The plan that `autoparallelize` gave the model, not those of later calls with other shapes or modes.

    Raises InputError for a model without a plan.
    """
    return planned_of(model).programs.first.plan
