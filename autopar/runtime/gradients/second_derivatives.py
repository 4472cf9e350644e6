"""Backward passes whose gradients are differentiated again (`create_graph=True`): penalties on gradients, Hessians.

What an exchange does to a gradient is linear, and its conjugate is what the exchange does to the value: the gradient of
a gradient goes the way of the value (`resharding.reshard`, read twice). So the backward of an exchange is, there,
another exchange that autograd knows; that of parameters too, which elsewhere move beside autograd
(`communication.transit`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import InputError


def are_differentiated() -> bool:
    """Asked in a backward: whether its gradients are to be differentiated again."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def changed_owner(gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A gradient of all ranks' losses becomes one of a rank's own, or the other way round. What is asked of it is of
    the other kind than what it is asked for, so that the change and its inverse meet."""
    return _ChangedOwner.apply(gradient, change) if are_differentiated() else change(gradient)


class _ChangedOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return change(gradient)

    @staticmethod
    def backward(ctx: Any, asked: torch.Tensor) -> tuple[torch.Tensor, None]:
        return asked, None


def detached(call: Callable[[], Any]) -> Any:
    """What a call gives whose forward asks for gradients itself, under `no_grad`: it does so under `enable_grad`."""
    with torch.enable_grad():
        found = call()
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)


def once(what: str, mend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A backward that has no second derivative; who asks for one gets InputError, as `once_differentiable` does it, but
    also where the gradient that came in needs none: what the forward has saved may."""
    message = f"the gradient of {what}, run on parts, cannot be differentiated again (create_graph=True): {mend}"

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *gradients: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *gradients)
            if not are_differentiated():
                return found
            return tuple([None if one is None else _refused(one, message) for one in found])

        return wrapper

    return decorated


def _refused(gradient: torch.Tensor, message: str) -> torch.Tensor:
    found: torch.Tensor = _Refused.apply(gradient.detach().requires_grad_(), message)
    return found


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, message: str) -> torch.Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise InputError(ctx.message)
