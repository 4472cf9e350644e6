"""Hooks of a planned model's parameters run when gradients arrive, and not in passes that leave gradients waiting.

In such a pass (`gradients.accumulation`), autograd reaches the parameter without a gradient and goes on: a hook would
be called with None, and a post-accumulate hook with the gradient of an earlier pass. Where waiting gradients are
reduced at the end of a pass that did not reach the parameter, autograd takes no part, and the hooks are called here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

Hook = Callable[[Any], Any]
_before: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters reached without a gradient: `_gradient_now` then


@functools.cache
def hooks_wait_for_gradients() -> None:
    """From now on, hooks registered on DTensors are called only if a gradient has come. Once a process."""
    for name, waits in (
        ("register_hook", _with_gradient),
        ("register_post_accumulate_grad_hook", _of_one_with_gradient),
    ):
        setattr(DTensor, name, _registers(getattr(torch.Tensor, name), waits))


def wait_for_gradients(parameter: torch.Tensor) -> None:
    """The same for hooks that were registered on the plain parameter that this one has replaced."""
    for hooks, waits in ((_hooks(parameter), _with_gradient), (_hooks_behind(parameter), _of_one_with_gradient)):
        for key, hook in hooks.items():
            hooks[key] = waits(hook)


def comes_without_gradient(parameter: torch.Tensor) -> None:
    """Note that autograd reached a parameter without a gradient: if none comes otherwise, no hook is to run."""
    if _hooks_behind(parameter):
        _before[parameter] = _gradient_now(parameter)


def _gradient_now(parameter: Any) -> tuple[int, ...]:
    """A key that differs after another pass, with another gradient, or with one that was added to."""
    number, gradient = torch._C._current_graph_task_id(), parameter.grad
    return (number,) if gradient is None else (number, id(gradient), gradient._version)


def accumulate(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Add `local`, this rank's part in the parameter's layout, to its gradient and run hooks, as autograd does."""
    gradient: Any = local.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        gradient = DTensor.__new__(DTensor, gradient, parameter._spec, requires_grad=False)
    with torch.no_grad():
        for hook in _hooks(parameter).values():
            other = hook(gradient)
            gradient = gradient if other is None else other
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for hook in _hooks_behind(parameter).values():
            hook(parameter)


def _hooks(parameter: Any) -> dict[Any, Hook]:
    return parameter._backward_hooks or {}


def _hooks_behind(parameter: Any) -> dict[Any, Hook]:
    return parameter._post_accumulate_grad_hooks or {}


def _registers(register: Callable[..., Any], waits: Callable[[Hook], Hook]) -> Callable[..., Any]:
    @functools.wraps(register)
    def registered(tensor: DTensor, hook: Hook) -> Any:
        return register(tensor, waits(hook))

    return registered


def _with_gradient(hook: Hook) -> Hook:
    @functools.wraps(hook)
    def called(gradient: Any) -> Any:
        return None if gradient is None else hook(gradient)

    return called


def _of_one_with_gradient(hook: Hook) -> Hook:
    @functools.wraps(hook)
    def called(parameter: Any) -> Any:
        without = parameter.grad is None or _before.get(parameter) == _gradient_now(parameter)
        return None if without else hook(parameter)

    return called
