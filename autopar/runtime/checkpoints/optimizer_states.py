"""Optimizer state by parameter name: tensors in their parameters' layouts, and a list of everything else.

`torch.distributed.checkpoint.state_dict` makes missing state by a step with zero gradients. Saved before the first
step, Adam's count of steps would then be wrong, and a parameter that never had a gradient could not be loaded. Here the
list says what was saved, and exactly that is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import InputError
from autopar.runtime.dtensors.joined_parts import joined
from autopar.runtime.stored.parameters import tied_names

Tensors = dict[str, dict[str, torch.Tensor]]


def named_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[Tensors, dict[str, Any]]:
    """The state's tensors by parameter and key, and the list: groups, values that are no tensors, shapes and dtypes."""
    names = _names(model)
    tensors: Tensors = {}
    listed: dict[str, Any] = {"groups": [], "kinds": [], "values": {}, "tensors": {}}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members = [_name_of(p, names) for p in group["params"]]
            listed["groups"].append({**group, "params": members})
            listed["kinds"].append(type(optimizer).__name__)
            for name, parameter in zip(members, group["params"], strict=True):
                state = optimizer.state.get(parameter, {})
                # torch saves no parts of sums, as Shampoo's products of a sharded gradient are
                own = {key: joined(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
                tensors[name] = own
                listed["values"][name] = {key: value for key, value in state.items() if key not in own}
                listed["tensors"][name] = {key: (tuple(value.shape), value.dtype) for key, value in own.items()}
    return tensors, listed


def empty_state(model: nn.Module, optimizers: Sequence[Optimizer], listed: Mapping[str, Any]) -> Tensors:
    """Tensors to read a saved state into, each in its parameter's layout.

    Raises InputError if the groups differ, or if the optimizer is of another class with other options.
    """
    names = _names(model)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    ours = [[_name_of(p, names) for p in group["params"]] for group in groups]
    theirs = [list(group["params"]) for group in listed["groups"]]
    if ours != theirs:
        raise InputError(
            f"the optimizer has other parameters or groups than the saved one: {_summary(ours)} here, "
            f"{_summary(theirs)} saved. Build it as it was when it was saved"
        )
    kinds = [type(optimizer).__name__ for optimizer in optimizers for _ in optimizer.param_groups]
    for kind, saved_kind, group, saved in zip(kinds, listed.get("kinds", kinds), groups, listed["groups"], strict=True):
        if kind != saved_kind and group.keys() != saved.keys():
            raise InputError(
                f"the checkpoint has the state of {saved_kind}, and the optimizer here is {kind}: give one of that "
                "kind, or load the model alone and start the optimizer anew"
            )
    tensors: Tensors = {}
    for group in groups:
        for parameter in group["params"]:
            name = _name_of(parameter, names)
            tensors[name] = {
                key: _empty_for(parameter, key, torch.Size(shape), dtype)
                for key, (shape, dtype) in listed["tensors"][name].items()
            }
    return tensors


def set_state(optimizers: Sequence[Optimizer], tensors: Tensors, listed: Mapping[str, Any]) -> None:
    """Give the optimizers the state that was read; it is cast and moved as `Optimizer.load_state_dict` does."""
    saved_groups = iter(listed["groups"])
    for optimizer in optimizers:
        state: dict[int, dict[str, Any]] = {}
        groups = []
        for _ in optimizer.param_groups:
            group = dict(next(saved_groups))
            numbers = []
            for name in group["params"]:
                numbers.append(number := len(state))
                state[number] = {**tensors[name], **listed["values"][name]}
            groups.append({**group, "params": numbers})
        with_values = {number: values for number, values in state.items() if values}
        optimizer.load_state_dict({"state": with_values, "param_groups": groups})


def _empty_for(parameter: torch.Tensor, key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as the optimizer would make it: like the parameter; scalars (counts of steps) plain, on the CPU."""
    if not shape and (key == "step" or parameter.ndim):
        return torch.empty((), dtype=dtype, device="cpu")
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return parameter.new_empty(shape, dtype=dtype)  # sums over rows or columns, as Adafactor keeps them


def _names(model: nn.Module) -> dict[int, str]:
    return {id(model.get_parameter(names[0])): names[0] for names in tied_names(model)}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise InputError(
            "the optimizer holds a parameter that the model does not have: build it from this model's parameters, "
            "after autoparallelize"
        )
    return name


def _summary(groups: Sequence[Sequence[str]]) -> str:
    return f"{len(groups)} groups of {', '.join(str(len(group)) for group in groups)} parameters"
