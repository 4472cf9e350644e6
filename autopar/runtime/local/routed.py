"""Experts that run in a loop of their own, sharded by tokens: every rank reads all weights, whatever its tokens meet.

Data decide which experts a rank's tokens go to. For the weights of the other experts, autograd saves nothing on that
rank and has no gradient, so ranks would gather different weights again in backward, and reduce different gradients.
Here, on every rank, backward begins with all weights in the same order, and a weight has a gradient on all ranks or on
none: zeros if only other ranks' tokens met it, and none if no rank's did, as in one process.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.communication import collectives
from autopar.runtime.communication.compiled_outputs import as_no_view
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.draws import drawn

_TOKENS = 2  # operands for each token: what the experts are given, and the routes' weights


@torch.compiler.disable(reason="which experts a rank's tokens go to depends on data")  # type: ignore[untyped-decorator]
def routed(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor | None
) -> Any:
    """`target(hidden, routes, weights, *parameters)` on this rank's tokens; `key`: where it draws random numbers."""
    hidden, routes, *others = args
    groups = [ctx.mesh.groups[axis] for axis in ctx.axes_that_shard(ctx.inputs[0], 0)]
    hidden, *others = entered = _Entered.apply(groups, hidden, *others)
    tensors = (hidden, routes, *others)
    done = target(*tensors, **kwargs) if key is None else drawn(target, tensors, kwargs, ctx, key)
    return _Left.apply(done, *entered)


class _Entered(torch.autograd.Function):
    """Passes on what the experts are given; its backward comes after that of all their ops, used or not."""

    @staticmethod
    def forward(ctx: Any, groups: list[str], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.groups = groups
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        learning = [place for place, learns in enumerate(ctx.needs_input_grad[1:]) if learns]
        weights = [place for place in learning if place >= _TOKENS]
        has_gradient = [gradients[place] is not None for place in weights]
        device = ctx.like[0][-1]
        met = {*learning} - {*weights} | {*_on_some_rank(weights, has_gradient, device, ctx.groups)}
        return None, *(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None and place in met else gradient
            for place, (gradient, (shape, dtype, device)) in enumerate(zip(gradients, ctx.like, strict=True))
        )


def _on_some_rank(places: list[int], flags: list[bool], device: torch.device, groups: list[str]) -> list[int]:
    """Those of the places that are set in `flags` on any rank."""
    if not places:
        return []
    on_any = torch.tensor(flags, dtype=torch.uint8, device=device)
    for group in groups:
        on_any = collectives.all_reduce(on_any, "max", group)
    return [place for place, is_set in zip(places, on_any.tolist(), strict=True) if is_set]


class _Left(torch.autograd.Function):
    """Passes on the result; its backward comes before that of all ops of the experts."""

    @staticmethod
    def forward(ctx: Any, done: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*entered[_TOKENS:])
        return as_no_view(done)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # gathers freed weights again now, in the same order on all ranks
        return gradient, *(None for _ in ctx.needs_input_grad[1:])
