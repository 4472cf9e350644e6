"""Waiting gradients are dropped where those of a plain model would be: when `.grad` is zeroed in any way, or assigned.

While gradients wait, `.grad` is None before and after it is zeroed, so nothing else shows that it was. torch has hooks
only around an optimizer's `step()`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.runtime.gradients.accumulation import every

GRADIENT: Any = torch.Tensor.grad
"""torch's own attribute, for code that sets `.grad` without dropping waiting gradients."""


@functools.cache
def drop_with_gradients() -> None:
    """From now on, `zero_grad()` of optimizers and modules drops the waiting gradients of their parameters, and an
    assignment to `.grad` those of that parameter. Once a process."""
    of_optimizers, of_modules = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(of_optimizers)
    def zero_grad_of_optimizer(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        _drop(p for group in self.param_groups for p in group["params"])
        of_optimizers(self, *args, **kwargs)

    @functools.wraps(of_modules)
    def zero_grad_of_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        _drop(self.parameters())
        of_modules(self, *args, **kwargs)

    torch.optim.Optimizer.zero_grad = zero_grad_of_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = zero_grad_of_module  # type: ignore[method-assign]
    DTensor.grad = property(GRADIENT.__get__, _assign, _delete)  # type: ignore[assignment]


def _drop(parameters: Iterable[torch.Tensor]) -> None:
    waiting = [accumulation for accumulation in every if accumulation.waiting]
    dropped = list(parameters) if waiting else []
    for accumulation in waiting:
        accumulation.forget(dropped)


def _assign(tensor: DTensor, value: Any) -> None:
    waiting = [accumulation for accumulation in every if accumulation.waiting]
    for accumulation in waiting:
        if value is not None and GRADIENT.__get__(tensor) is not None and accumulation.waits(tensor):
            raise InputError(
                "a parameter's `.grad` is set while gradients of micro-batches wait to be summed over the ranks: it "
                "lacks these gradients. Set it after the last backward of the step, or to None first"
            )
        accumulation.forget([tensor])
    GRADIENT.__set__(tensor, value)


def _delete(tensor: DTensor) -> None:
    _drop([tensor])
    GRADIENT.__delete__(tensor)
