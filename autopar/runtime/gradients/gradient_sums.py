"""Sums of the gradients of a parameter that several ops read, added up as they come.

Autograd adds them up itself. But where the first gradient is a view, as those of linear layers are, it makes the sum
beside the first two; and where recomputed blocks read the parameter, it adds nothing before a whole block is through.
So each op reads such a parameter through a node of its own, which adds to one sum for all ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autopar.runtime.communication.convert import Stage
from autopar.runtime.gradients.accumulation import reduced_at_once
from autopar.runtime.gradients.own_gradients import unshared
from autopar.runtime.gradients.passes import fills_gradients
from autopar.runtime.gradients.second_derivatives import are_differentiated

if TYPE_CHECKING:
    from autopar.runtime.communication.transit import Transit


class GradientSums:
    """The sums of one call, by the parameter's place in the state and the stage that is to reduce the sum (or None).

    Each backward pass has its own sums, so that what a failed pass has left does not reach the next.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], dict[Stage | None, torch.Tensor]] = {}

    def add(self, place: int, stage: Stage | None, gradient: torch.Tensor) -> None:
        """Add a gradient to its sum; to be called in the backward of an autograd function that was given it."""
        before = self.take(place, stage, None)
        self.put(place, stage, unshared(gradient) if before is None else before.add_(gradient))

    def put(self, place: int, stage: Stage | None, gradient: torch.Tensor) -> None:
        """Keep a gradient that nobody else holds as the sum so far."""
        self._found.setdefault(_key_of(place), {})[stage] = gradient

    def take(self, place: int, stage: Stage | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add the sum so far to a gradient, and keep it here no longer."""
        before = self._found.get(_key_of(place), {}).pop(stage, None)
        if before is None or gradient is None:
            return gradient if before is None else before
        return before.add_(gradient)

    def take_rest(self, place: int) -> list[torch.Tensor]:
        """Remove, reduce and return the remaining sums of a parameter."""
        remaining = self._found.pop(_key_of(place), {})
        stages = {stage: gradient for stage, gradient in remaining.items() if stage is not None}
        return [*(gradient for stage, gradient in remaining.items() if stage is None), *reduced_at_once(stages)]


def _key_of(place: int) -> tuple[int, int]:
    return torch._C._current_graph_task_id(), place


@dataclass(eq=False)
class Summed:
    """A node of the local graph, through which one of several ops reads a parameter."""

    place: int
    stage: Stage | None
    __name__: str = "summed"

    def __call__(self, transit: Transit | None, value: torch.Tensor) -> torch.Tensor:
        if transit is None or not (value.requires_grad and torch.is_grad_enabled()):
            return value
        read: torch.Tensor = _Sum.apply(self, transit, value)
        return read


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summed: Summed, transit: Transit, value: torch.Tensor) -> torch.Tensor:
        ctx.given = summed, transit
        ctx.set_materialize_grads(False)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, torch.Tensor | None]:
        summed, transit = ctx.given
        if gradient is None or gradient.layout is not torch.strided or are_differentiated():
            return None, None, gradient
        transit.reductions.add_up(summed.place, summed.stage, gradient, fills=fills_gradients(ctx))
        return None, None, None
