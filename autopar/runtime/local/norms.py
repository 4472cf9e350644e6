"""Batch normalisation with the statistics of the global batch; running statistics of instance normalisation."""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.ops.norms import RUNNING, named
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.gradients.second_derivatives import refuses_second
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import reduced


class _Normalised(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias per channel; mean and biased variance are outputs too.

    Forward sums the first two moments over the ranks, once: in float64, so that for narrower `x` no digits of their
    difference are lost where the mean is large against the deviation. Backward sums Σg and Σg·x̂, from which follows

        dx = weight / sqrt(var + eps) · (g - Σg / n - x̂ · Σg·x̂ / n).

    Gradients of weight and bias are this rank's summands.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        count: int,
        axes: tuple[int, ...],
        mesh: LocalMesh,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [d for d in range(x.ndim) if d != 1]
        wide = torch.promote_types(x.dtype, torch.float32)
        variance, mean = torch.var_mean(x.to(wide), dims, correction=0)
        if axes:
            first = mean.double()
            part = x.numel() / mean.numel() / count  # of the global batch
            moments = torch.stack((first, variance.double() + first.square())) * part
            first, second = reduced(moments, "sum", axes, mesh)
            mean, variance = first.to(wide), (second - first.square()).clamp(min=0).to(wide)
        own_weight, own_bias = (None if t is None else t.to(wide) for t in (weight, bias))
        out = torch.batch_norm(x, own_weight, own_bias, mean, variance, False, 0.0, eps, False)
        ctx.save_for_backward(x, mean, (variance + eps).rsqrt(), weight)
        ctx.count, ctx.axes, ctx.mesh, ctx.bias_dtype = count, axes, mesh, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance)
        return as_output(out), mean, variance

    @staticmethod
    @refuses_second("batch normalisation", "a norm of single rows (GroupNorm, LayerNorm) has second derivatives")
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, mean, scale, weight = ctx.saved_tensors
        ones = torch.ones_like(mean)
        _, of_scale, of_shift = torch.ops.aten.native_batch_norm_backward(
            gradient, x, ones, None, None, mean, scale, True, 0.0, [False, True, True]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            # Divided before they are stacked: Inductor would reduce the stacked tensor in place, and so overwrite the
            # gradients of weight and bias if these were parts of it (torch 2.13).
            sums = torch.stack((of_shift / ctx.count, of_scale / ctx.count))
            shift, slope = reduced(sums, "sum", ctx.axes, ctx.mesh)
            factor = scale if weight is None else scale * weight
            slope = slope * scale
            of_x = torch.addcmul(_along((mean * slope - shift) * factor, x), gradient, _along(factor, x))
            of_x = of_x.addcmul_(x, _along(-slope * factor, x)).to(x.dtype)
        of_weight = of_scale.to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = of_shift.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None, None, None, None


def _along(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One number a channel, shaped to broadcast against x."""
    return channels.view(1, -1, *(1,) * (x.ndim - 2))


def batch_norm(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.batch_norm` or `torch.batch_norm`, training: statistics over all axes that shard x, except on channels.

    Running statistics are updated equally on every rank. Outside training, it is the op itself.
    """
    arguments = named(target, args, kwargs)
    return _batch_norm(ctx, **arguments) if arguments.get("training") else target(*args, **kwargs)


def _batch_norm(
    ctx: LocalContext,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    dims = [d for d in range(input.ndim) if d != 1]
    count = math.prod([ctx.input_shapes[0][d] for d in dims])
    axes = ctx.axes_that_shard(ctx.inputs[0], *dims)
    out, mean, variance = _Normalised.apply(input, weight, bias, eps, count, axes, ctx.mesh)
    with torch.no_grad():
        if running_mean is not None:
            write_statistics(running_mean, running_mean.lerp(mean.to(running_mean.dtype), momentum))
        if running_var is not None:
            unbiased = variance * (count / (count - 1))
            write_statistics(running_var, running_var.lerp(unbiased.to(running_var.dtype), momentum))
    return out


def instance_norm(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.instance_norm` or `torch.instance_norm`, training, with running statistics, which depend on all rows.

    They move towards the mean of the rows' statistics. With a momentum of 1, the op gives this mean for the rank's
    rows; the means of all ranks are then combined, weighted by their numbers of rows.
    """
    arguments = named(target, args, kwargs)
    own = {name: torch.zeros_like(arguments[name]) for name in RUNNING}
    out = target(**{**arguments, **own, "momentum": 1.0})
    with torch.no_grad():
        part = arguments["input"].shape[0] / ctx.input_shapes[0][0]  # of the global batch
        axes = ctx.axes_that_shard(ctx.inputs[0], 0)
        joined = reduced(torch.stack([own[name] for name in RUNNING]).double() * part, "sum", axes, ctx.mesh)
        for buffer, value in zip([arguments[name] for name in RUNNING], joined, strict=True):
            write_statistics(buffer, buffer.lerp(value.to(buffer.dtype), arguments.get("momentum", 0.1)))
    return out


def write_statistics(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write running statistics without a new version for autograd, as torch's own norms do: another call of the module
    may have saved them for its backward, which does not read them."""
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(buffer):
        buffer.copy_(value)
