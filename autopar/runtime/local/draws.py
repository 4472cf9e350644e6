"""Ops that draw random numbers, other than dropout: the same numbers on any mesh, on every rank and in a replay.

Uniform, normal and exponential numbers come from a counter over global indices, so that a rank draws its own part
alone. Everything else (permutations, integers, other distributions) is drawn whole on every rank, seeded by the step's
key.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from autopar.ops.random_ops import BY_COUNTER, drawn_name
from autopar.runtime.local.context import LocalContext
from autopar.runtime.randomness import bits, seeded

_APART = 1 << 32  # distance between the seeds of two parts: larger than that of any two nodes' positions
_LEAST = 2.0**-24  # least exponential number, above 0 in every dtype, as its logarithm is taken (Gumbel)
_MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # with so many, 1 is never drawn


def drawn(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor | None
) -> Any:
    """This rank's part of what `target(*args, **kwargs)` draws, also of `apply_inplace(method, base, ...)`."""
    assert key is not None
    in_place = target.__name__ == "apply_inplace"
    name, arguments = (args[0].strip("_"), args[1:]) if in_place else (drawn_name(target), args)
    if name not in BY_COUNTER or (name == "normal" and not in_place):
        return _seeded(target, args, kwargs, ctx, key)
    like = (
        arguments[0]
        if arguments and isinstance(arguments[0], torch.Tensor)
        else torch.empty(0, device=kwargs.get("device"))
    )
    dtype = kwargs.get("dtype") or like.dtype

    def option(place: int, called: str, default: Any) -> Any:
        own = in_place or name == "bernoulli"  # factories have sizes in these places
        return kwargs.get(called, arguments[place] if own and len(arguments) > place else default)

    if name == "bernoulli":
        numbers = _uniform(ctx, key, 32) < option(1, "p", 0.5 if in_place else like)
    elif name in ("randn", "randn_like", "normal"):
        each = 1 + 1j if dtype.is_complex else 1  # `normal_` gives both parts the mean
        numbers = _normal(ctx, key, dtype) * option(2, "std", 1.0) + option(1, "mean", 0.0) * each
    elif name == "exponential":
        numbers = (-torch.log1p(-_uniform(ctx, key, 32))).clamp_(min=_LEAST) / option(1, "lambd", 1.0)
    else:
        low, high = option(1, "from", 0.0), option(2, "to", 1.0)
        digits, parts = _MANTISSA_BITS.get(dtype.to_real(), 32), (2,) * dtype.is_complex
        numbers = _uniform(ctx, key, digits, *parts) * (high - low) + low
        numbers = torch.view_as_complex(numbers) if dtype.is_complex else numbers
    return numbers.to(device=like.device, dtype=dtype).requires_grad_(bool(kwargs.get("requires_grad")))


def _uniform(ctx: LocalContext, key: torch.Tensor, digits: int, *further: int) -> torch.Tensor:
    """Multiples of 2^-digits in [0, 1), float64, for this rank's elements; `further`: dims for each element."""
    dims = enumerate(ctx.shapes[0])
    indices = [ctx.positions(ctx.outputs[0], dim, length, key.device) for dim, length in dims]
    indices += [torch.arange(count, device=key.device, dtype=torch.int32) for count in further]
    numbers = bits(key, ctx.position, indices).to(torch.float64) + 2.0**31
    return (numbers * 2.0 ** (digits - 32)).floor() * 2.0**-digits


def _normal(ctx: LocalContext, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers from pairs of uniform ones (Box and Muller, 1958); complex ones, of variance 1, from one pair."""
    first, second = _uniform(ctx, key, 32, 2).unbind(-1)
    length, angle = torch.sqrt(-2 * torch.log1p(-first)), 2 * math.pi * second
    return torch.polar(length / math.sqrt(2), angle) if dtype.is_complex else length * torch.cos(angle)


def _seeded(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor) -> Any:
    """The whole, drawn equally on every rank; or a part, by the rule of a custom op, with a seed of its own."""
    part = 0
    for axis, (placement, ranks) in enumerate(zip(ctx.outputs[0].placements, ctx.mesh.shape, strict=True)):
        if placement.is_sharded:
            part = part * ranks + ctx.mesh.coordinate[axis]
    with seeded(key, ctx.position + _APART * part):
        return target(*args, **kwargs)
