"""Small architectures on real ranks: loss and gradients against one process, under three kinds of plans."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))
from architecture_plans import kinds_of, mesh_shape, plan_of, promote, splits
from promotion import Promotion
from small_architectures import MODELS, Inputs

from autopar.plans import Plan
from autopar.runtime.application import apply
from autopar.runtime.ranks.agreement import from_rank_zero
from autopar.tracing import trace

CPU = torch.device("cpu")
SMALLEST = 1e-7  # smaller gradients are rounding errors: exact ones cancel, as for a shift before softmax


@functools.lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def loss_and_gradients(model: nn.Module, inputs: Inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss (the model's result, or its attribute `loss`) and the gradients of all parameters, as whole tensors."""
    result = model(**inputs)
    loss: Any = result if isinstance(result, torch.Tensor) else result.loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach(), gradients


def deviations(name: str) -> dict[str, dict[str, Any]]:
    """For each kind of plan the largest difference of the loss or a gradient, relative to the largest value."""
    found = {}
    with Promotion(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries, and of ops without a rule, which other tests check
        alone, inputs = MODELS[name]()
        loss, gradients = loss_and_gradients(alone, inputs)
        for kind in kinds_of(name):
            model, inputs = MODELS[name]()
            traced = trace(model, inputs)
            promote(traced.graph)
            make = functools.partial(_planned, kind, name, model, traced)
            plan = Plan.from_json(from_rank_zero(make, CPU))
            apply(model, traced, plan, mesh_of(mesh_shape(kind)), replan=_no_replan)
            split_loss, split_gradients = loss_and_gradients(model, inputs)
            assert split_gradients.keys() == gradients.keys()
            errors = [_relative(split_loss, loss)]
            errors += [_relative(split_gradients[key], gradients[key]) for key in gradients]
            found[kind] = {"error": max(errors), "splits": splits(plan), "collectives": len(plan.collectives)}
    return found


def _planned(kind: str, name: str, model: nn.Module, traced: Any) -> str:
    return plan_of(kind, name, model, traced).to_json()


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / (expected.abs().max() + SMALLEST)).item()


def _no_replan(*_: Any) -> Any:
    raise AssertionError("every call is alike")


CASES: dict[int, dict[str, Callable[[], Any]]] = {4: {name: functools.partial(deviations, name) for name in MODELS}}
