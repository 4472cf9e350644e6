"""Refuses optimizer steps while gradients of the optimizer's parameters wait, since the step would miss them.

A step with a closure takes its last gradients from the closure, so there the check comes after the closure has run.
Other arguments of steps, and optimizers without a planned model's parameters, are left alone.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.gradients.accumulation import every

_NAME = "closure"


@functools.cache
def refuse_early_steps() -> None:
    """Check optimizer steps from now on; once a process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's pre-step hook: `args` begin with the optimizer itself; a returned pair replaces `args` and `kwargs`."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    if callable(kwargs.get(_NAME)):
        return args, {**kwargs, _NAME: _checked(kwargs[_NAME], optimizer)}
    if len(args) > 1 and _is_closure(optimizer, args[1]):
        return (args[0], _checked(args[1], optimizer), *args[2:]), kwargs
    return _check(optimizer)


def _is_closure(optimizer: Optimizer, argument: Any) -> bool:
    """Whether the first argument of `step` is a closure: a function, or any callable if it is named `closure` there."""
    if inspect.isroutine(argument) or isinstance(argument, functools.partial):
        return True
    return callable(argument) and list(inspect.signature(type(optimizer).step).parameters)[1:2] == [_NAME]


def _checked(closure: Any, optimizer: Optimizer) -> Any:
    @functools.wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _check(optimizer)
        return result

    return checked


def _check(optimizer: Optimizer) -> None:
    for accumulation in every:
        accumulation.check(optimizer)
