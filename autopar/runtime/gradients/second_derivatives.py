"""Backward passes whose gradients are differentiated again (`create_graph=True`): penalties on gradients, Hessians.

What a conversion does to a gradient is linear, and its conjugate is what the conversion does to the value. So the
gradient of a gradient takes the way of the value (`resharding.reshard`, read twice). In such passes, the backward of a
conversion is another conversion that autograd records; so is that of parameters, whose gradients otherwise bypass
autograd (`communication.transit`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import InputError


def are_differentiated() -> bool:
    """In a backward: whether its gradients are to be differentiated again."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def changed_owner(gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Turn a gradient of all ranks' losses into one of a rank's own loss, or the other way round. If it is
    differentiated again, the change and its inverse cancel, and the second gradient passes unchanged."""
    return _ChangedOwner.apply(gradient, change) if are_differentiated() else change(gradient)


class _ChangedOwner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return change(gradient)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def detached(call: Callable[[], Any]) -> Any:
    """The detached results, under `no_grad`, of a call whose forward computes gradients and so needs `enable_grad`."""
    with torch.enable_grad():
        result = call()
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def refuses_second(subject: str, mend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a backward without a second derivative: asking for one raises InputError. `once_differentiable`
    does so too, but not where the incoming gradient requires none, although tensors that the forward has saved may.

    The error is raised where the second backward reaches these tensors and the incoming gradients. So the forward must
    save inputs or outputs, not only tensors that it makes in between, which have no history.
    """
    message = f"the gradient of {subject}, run on parts, cannot be differentiated again (create_graph=True): {mend}"

    def decorated(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def wrapper(ctx: Any, *gradients: Any) -> Any:
            if not are_differentiated():
                with torch.no_grad():
                    return backward(ctx, *gradients)
            read = _Read(ctx)
            with torch.no_grad():
                gradients_of_inputs = backward(read, *gradients)
            tensors = [t for t in (*gradients, *read.saved_tensors) if isinstance(t, torch.Tensor) and t.requires_grad]
            return tuple([None if one is None else _refused(one, message, tensors) for one in gradients_of_inputs])

        return wrapper

    return decorated


class _Read:
    """The context of a backward whose saved tensors are unpacked once: `checkpoint` refuses to do so again."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _refused(gradient: torch.Tensor, message: str, reached: list[torch.Tensor]) -> torch.Tensor:
    gradient = gradient.detach()
    refused: torch.Tensor = _Refused.apply(message, gradient if reached else gradient.requires_grad_(), *reached)
    return refused


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, gradient: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> None:
        raise InputError(ctx.message)
