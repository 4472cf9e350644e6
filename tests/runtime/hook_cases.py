"""Hooks and code that modules get after planning, which calls of a planned model would not run: on real ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from habit_cases import planned
from large_cases import refusal
from loop_cases import ROWS, Net, whole
from torch.nn.modules import module as modules


def hook_registered_late() -> list[str]:
    model = planned("ddp")
    handle = model.get_submodule("up").register_forward_hook(lambda *_: None)
    late = refusal(lambda: model(ROWS))
    handle.remove()
    return [late, refusal(lambda: model(ROWS))]


def backward_hook() -> str:
    model = Net().double()
    model.down.register_full_backward_hook(lambda *_: None)
    return refusal(lambda: planned("ddp", model))


def backward_hook_for_all() -> str:
    handle = modules.register_module_full_backward_hook(lambda *_: None)
    try:
        return refusal(lambda: planned("ddp"))
    finally:
        handle.remove()


def hooks_for_all() -> dict[str, Any]:
    """Warnings about global module hooks: one that exists while the model is traced, and one registered later."""

    def plus_one(module: Any, args: Any, output: Any) -> Any:
        return output + 1 if isinstance(module, torch.nn.Linear) else None

    found: dict[str, Any] = {}
    handle = modules.register_module_forward_hook(plus_one)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = planned("ddp")
    handle.remove()
    found["traced"] = [str(one.message) for one in told]
    alone = Net().double()
    alone.load_state_dict({name: whole(one) for name, one in model.state_dict().items()})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with_it = model(ROWS)
        handle = modules.register_module_forward_pre_hook(lambda *_: None)
        model(ROWS)
        model(ROWS)
        handle.remove()
        model(ROWS)
    found["late"] = [str(one.message) for one in told]
    handle = modules.register_module_forward_hook(plus_one)
    found["same"] = torch.allclose(alone(ROWS), with_it, rtol=1e-12)
    handle.remove()
    return found


def code_set_late() -> dict[str, list[str]]:
    """Errors of calls while a module's code or parameters are replaced, and after they are restored."""
    model = planned("ddp", Growing().double())
    up, kind = model.get_submodule("up"), torch.nn.Linear
    before = kind.forward
    changes: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "forward": (lambda: setattr(up, "forward", torch.sin), lambda: delattr(up, "forward")),
        "method": (lambda: setattr(model, "scaled", torch.sin), lambda: delattr(model, "scaled")),
        "class": (lambda: setattr(up, "__class__", torch.nn.Identity), lambda: setattr(up, "__class__", kind)),
        "forward of a class": (lambda: setattr(kind, "forward", torch.sin), lambda: setattr(kind, "forward", before)),
        "an attribute": (lambda: setattr(up, "note", torch.sin), lambda: None),
        "a parameter": (lambda: model.biases.append(torch.nn.Parameter(torch.zeros(4).double())), lambda: None),
    }
    told = {}
    for name, (change, back) in changes.items():
        change()
        told[name] = [refusal(lambda: model(ROWS))]
        back()
        if name != "a parameter":
            told[name].append(refusal(lambda: model(ROWS)))
    return told


class Growing(Net):
    """With a method, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = torch.nn.ParameterList([torch.zeros(4)])

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return 2 * loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x)) + sum(bias.sum() for bias in self.biases)


class Activated(torch.nn.Module):
    """Activations in an attribute and in a list; the module defines its own `__deepcopy__`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.more = torch.nn.Linear(16, 4), torch.nn.ReLU(), torch.nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.up(x))
        for layer in self.more:
            x = layer(x)
        return x.square().mean()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


def copies_changed() -> dict[str, list[str]]:
    """Errors of a deep copy changed before its first call, of its unchanged model, and of a copy of a changed model."""
    changes: dict[str, Callable[[Any], Any]] = {
        "nothing": lambda model: None,
        "replaced": lambda model: setattr(model, "act", torch.nn.GELU()),
        "added": lambda model: model.more.append(torch.nn.Sigmoid()),
        "hook": lambda model: model.up.register_forward_hook(lambda *_: None),
        "forward": lambda model: setattr(model.act, "forward", torch.sin),
    }
    told = {}
    for name, change in changes.items():
        model = planned("ddp", Activated().double())
        copied = copy.deepcopy(model)
        change(copied)
        before = refusal(lambda copied=copied: copied(ROWS))
        untouched = refusal(lambda model=model: model(ROWS))
        change(model)
        copied = copy.deepcopy(model)
        told[name] = [before, untouched, refusal(lambda copied=copied: copied(ROWS))]
    return told


class Handing(Net):
    """Returns its input beside its loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x, super().forward(x)


def inputs_returned() -> dict[str, Any]:
    """An input with a history is returned as it is, in several calls."""
    model = planned("tp", Handing().double())
    start = ROWS.clone().requires_grad_()
    given = start * start
    for _ in range(3):
        back, _ = model(given)
    [first] = torch.autograd.grad(back.sum(), start, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), start)
    return {
        "same": back is given,
        "hooks": len(given._backward_hooks or ()),
        "error": (second - 2).abs().max().item(),
    }


CASES: dict[int, dict[str, Callable[[], Any]]] = {
    2: {
        case.__name__: case
        for case in (
            hook_registered_late,
            backward_hook,
            backward_hook_for_all,
            hooks_for_all,
            code_set_late,
            copies_changed,
            inputs_returned,
        )
    }
}
