"""Ops that draw masks or depend on positions: dropout, attention with dropout, causal attention on some queries."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional as F

from autopar.runtime.local.context import LocalContext
from autopar.runtime.randomness import bits, keep, seeded


def dropout(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor | None
) -> Any:
    """`F.dropout` and `F.dropout1d` to `3d` (whole channels) with the mask of the global tensor."""
    assert key is not None
    return _dropout(ctx, key, target.__name__, *args, **kwargs)


def _dropout(
    ctx: LocalContext,
    key: torch.Tensor,
    name: str,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0
    dims = input.ndim if name == "dropout" else input.ndim - int(name[-2])
    indices = [ctx.positions(ctx.outputs[0], d, ctx.shapes[0][d], input.device) for d in range(dims)]
    kept = keep(bits(key, ctx.position, indices), p)
    kept = kept.view((*kept.shape, *(1,) * (input.ndim - dims)))  # a tuple, for a scalar's is empty
    return torch.where(kept, input * (1 / (1 - p)), 0)


def attention_dropout(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: torch.Tensor | None
) -> Any:
    """`F.scaled_dot_product_attention` with dropout.

    If the queries are not sharded and a fused kernel supports the arguments, the kernel draws the mask: the same
    numbers in each replay and on each rank that has the same part, but not those of one process. Otherwise the score
    matrix is formed, and its mask is that of the global tensor.
    """
    assert key is not None
    return _attention_dropout(ctx, key, *args, **kwargs)


def takes_fused(query: torch.Tensor, *others: Any) -> bool:
    """Whether a fused kernel with dropout supports these arguments (those of `SDPAParams`): on GPUs, unless the user
    has turned such kernels off."""
    if not query.is_cuda:
        return False
    parameters = SDPAParams(query, *others)
    return can_use_flash_attention(parameters) or can_use_efficient_attention(parameters)


def _place(ctx: LocalContext) -> int:
    """A number that differs between the parts of an op, and is equal on ranks that hold the same part."""
    place = ctx.position
    for dim, length in enumerate(ctx.shapes[0]):
        for _, piece in ctx.cuts(ctx.outputs[0], dim, length):
            place = (place * 1_000_003 + piece + 1) % (1 << 31)
    return place


def _attention_dropout(
    ctx: LocalContext,
    key: torch.Tensor,
    query: torch.Tensor,
    key_states: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    arguments = query, key_states, value, attn_mask, dropout_p, is_causal
    parts = ctx.axes_that_shard(ctx.inputs[0], query.ndim - 2)  # no kernel knows its queries' positions
    if not parts and not torch.compiler.is_compiling() and takes_fused(*arguments, enable_gqa):
        with seeded(key, _place(ctx)):
            return F.scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key_states = key_states.repeat_interleave(query.shape[-3] // key_states.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = query @ key_states.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~causal_mask(ctx, query.ndim, key_states.shape[-2], query.device), -torch.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    sizes = enumerate(ctx.input_shapes[0][:-1])
    indices = [ctx.positions(ctx.inputs[0], dim, length, query.device) for dim, length in sizes]
    indices.append(torch.arange(scores.shape[-1], device=query.device, dtype=torch.int32))
    kept = keep(bits(key, ctx.position, indices), dropout_p)
    # private, and what the op itself uses: a query that sees no key has weights 0, not NaN
    weights = torch.ops.aten._safe_softmax(scores, -1)
    return torch.where(kept, weights / (1 - dropout_p), 0) @ value


def causal_attention(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, key: object) -> Any:
    """`F.scaled_dot_product_attention(is_causal=True)` on some of the queries, with a mask for their positions."""
    attended = Attended.of(*args, **kwargs)
    mask = causal_mask(ctx, attended.query.ndim, attended.key.shape[-2], attended.query.device)
    tensors = attended.query, attended.key, attended.value
    return F.scaled_dot_product_attention(*tensors, mask, scale=attended.scale, enable_gqa=attended.grouped)


class Attended(NamedTuple):
    """What causal attention reads of its arguments."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float | None
    grouped: bool

    @staticmethod
    def of(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = True,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Attended:
        return Attended(query, key, value, scale, enable_gqa)


def causal_mask(ctx: LocalContext, ndim: int, keys: int, device: torch.device) -> torch.Tensor:
    """Which of the `keys` each of this rank's queries sees: all up to its own position."""
    queries = ctx.positions(ctx.inputs[0], ndim - 2, ctx.input_shapes[0][-2], device)
    return queries.unsqueeze(-1) >= torch.arange(keys, device=device, dtype=torch.int32)
