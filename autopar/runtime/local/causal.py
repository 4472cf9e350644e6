"""Causal attention on a part of the queries, with the same amount of work on every rank.

A rank holds the queries of one stretch of positions, and all keys. Queries of the last stretch see twice as many keys
as the mean, so all ranks would wait for the rank that has them. So each rank swaps the second half of its queries with
its mirror, the rank that is equally far from the other end (the "zigzag" of Llama 3's context parallelism,
arXiv:2407.21783, section 3.3.2; of p stretches of two halves, rank r takes the halves r and 2 p - 1 - r). The numbers
of keys that its two halves see then add up to the same on all ranks.

No mask is formed. The queries of a half attend to all keys before the half, and causally to those at their own
positions. The fused kernels return the log-sum-exp with each result, by which the two results are combined. Their
backward is right for a part of the keys if it is given the result and log-sum-exp for all keys (ring attention,
arXiv:2310.01889). What is saved is what the op itself saves: query, key, value, result and log-sum-exp; halves are
swapped again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from autopar.runtime.communication.compiled_outputs import as_output
from autopar.runtime.gradients.second_derivatives import refuses_second
from autopar.runtime.local.context import LocalContext
from autopar.runtime.local.exchange import moved
from autopar.runtime.local.masks import Attended, causal_attention

_aten = torch.ops.aten
_Pair = tuple[torch.Tensor, torch.Tensor]


class Swap(NamedTuple):
    """An axis along which halves are swapped: `group`, its size, and this rank's coordinate in it."""

    group: str
    ranks: int
    rank: int


class Stretch(NamedTuple):
    """This rank's `length` queries from position `start` on, of `whole`; one swap for each axis that shards them."""

    start: int
    length: int
    whole: int
    swaps: tuple[Swap, ...]

    @staticmethod
    def of(ctx: LocalContext) -> Stretch:
        """The stretch of a node whose first input is the query; raises LayoutError if its layout is strided."""
        dim, layout = len(ctx.input_shapes[0]) - 2, ctx.inputs[0]
        whole, mesh = ctx.input_shapes[0][dim], ctx.mesh
        axes = ctx.axes_that_shard(layout, dim)
        swaps = tuple(Swap(mesh.groups[axis], mesh.shape[axis], mesh.coordinate[axis]) for axis in axes)
        return Stretch(*ctx.stretch(layout, dim, whole), whole, swaps)

    @property
    def staying(self) -> int:
        """How many queries stay: the first half, with the middle one of an odd number."""
        return self.length - self.length // 2

    def halves(self) -> tuple[tuple[slice, int], ...]:
        """The queries of the half that stays and of the half that came, each with its first position."""
        return (slice(0, self.staying), self.start), (
            slice(self.staying, None),
            self.whole - self.start - self.length // 2,
        )


def swapped_attention(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ctx: LocalContext, rng_key: object
) -> Any:
    """`F.scaled_dot_product_attention(is_causal=True)` on some of the queries; with a mask if no kernel supports it."""
    attended, stretch = Attended.of(*args, **kwargs), Stretch.of(ctx)
    if stretch.length > 1 and _fused(attended):
        return _Swapped.apply(attended.query, attended.key, attended.value, attended.scale, stretch)
    return causal_attention(target, args, kwargs, ctx, rng_key)


def _fused(attended: Attended) -> bool:
    """Whether a flash attention kernel, of a GPU or a CPU, supports these arguments."""
    query, key, value, _, grouped = attended
    if not query.numel() or (not grouped and query.shape[:-2] != key.shape[:-2]):
        return False
    if query.device.type == "cpu":
        return query.is_floating_point()
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    from torch.backends.cuda import SDPAParams, can_use_flash_attention

    queries = slice(query.shape[-2])  # the causal calls have as many keys as queries
    return can_use_flash_attention(
        SDPAParams(query, key[..., queries, :], value[..., queries, :], None, 0.0, True, grouped)
    )


class _Swapped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, stretch: Stretch
    ) -> torch.Tensor:
        query, key, value = map(_in_rows, (query, key, value))
        (own, start), (other, begin) = stretch.halves()
        part, statistics = _attend(query[..., own, :], key, value, start, scale)
        result = _like(part, stretch.length)
        result[..., own, :] = part
        (part,) = _swap([query[..., other, :]], stretch)
        part, others = _attend(part, key, value, begin, scale)
        (result[..., other, :],) = _swap([part], stretch)
        ctx.save_for_backward(query, key, value, result, torch.cat((statistics, others), -1))
        ctx.scale, ctx.stretch = scale, stretch
        return as_output(result)

    @staticmethod
    @refuses_second("causal attention", "pin its queries so that rows or heads are split, not positions")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, result, statistics = ctx.saved_tensors
        stretch, gradient = ctx.stretch, _in_rows(gradient)
        (own, start), (other, begin) = stretch.halves()
        results = [torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)]
        part = [t[..., own, :] for t in (gradient, query, result)]
        results[0][..., own, :] = _add_gradients(part, key, value, statistics[..., own], start, ctx.scale, results[1:])
        part = _swap([t[..., other, :] for t in (gradient, query, result)], stretch)
        part = [_add_gradients(part, key, value, statistics[..., other], begin, ctx.scale, results[1:])]
        (results[0][..., other, :],) = _swap(part, stretch)
        return *results, None, None


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _like(part: torch.Tensor, length: int) -> torch.Tensor:
    """An empty tensor for `length` queries, with the memory order of `part`."""
    order = sorted(range(part.dim()), key=part.stride, reverse=True)
    shape = (*part.shape[:-2], length, part.shape[-1])
    return torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)


def _swap(tensors: Sequence[torch.Tensor], stretch: Stretch) -> list[torch.Tensor]:
    """Exchange halves with the mirrored rank: over all axes in turn, all tensors in one exchange for each axis."""
    rows = torch.stack(list(tensors))
    for swap in stretch.swaps:
        mirror = [int(rank == swap.ranks - 1 - swap.rank) for rank in range(swap.ranks)]
        rows = moved(rows.unsqueeze(0), mirror, mirror, swap.group).squeeze(0)
    return list(rows.unbind())


def _parts(start: int, length: int) -> Iterator[tuple[slice, bool]]:
    """The keys that queries see: those at their positions, causally, and all before them, if there are any."""
    yield slice(start, start + length), True
    if start:
        yield slice(0, start), False


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, scale: float | None) -> _Pair:
    """Result and log-sum-exp of queries from position `start` on."""
    result: _Pair | None = None
    for keys, causal in _parts(start, query.shape[-2]):
        part = _forward(query, key[..., keys, :], value[..., keys, :], causal, scale)
        result = part if result is None else _joined(*result, *part)
    assert result is not None
    return result


def _joined(first: torch.Tensor, first_sum: torch.Tensor, second: torch.Tensor, second_sum: torch.Tensor) -> _Pair:
    """The result for all keys from two results, each for a part of them."""
    together = torch.logaddexp(first_sum, second_sum)
    weights = [(part - together).exp().unsqueeze(-1) for part in (first_sum, second_sum)]
    return (first * weights[0]).addcmul_(second, weights[1]).to(first.dtype), together


def _add_gradients(
    tensors: Sequence[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    statistics: torch.Tensor,
    start: int,
    scale: float | None,
    totals: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The gradient of queries from position `start` on, from `tensors`: the gradient of their results, the queries and
    the results. The gradients of the keys and values that they see are added to `totals`."""
    total: torch.Tensor | None = None
    for keys, causal in _parts(start, tensors[0].shape[-2]):
        key_and_value = key[..., keys, :], value[..., keys, :]
        of_queries, *others = _backward(tensors, *key_and_value, statistics, causal, scale)
        for sum_of, other in zip(totals, others, strict=True):
            sum_of[..., keys, :] += other
        total = of_queries if total is None else total.add_(of_queries)
        del of_queries, others, other  # kept beside the next ones, they would double the memory
    assert total is not None
    return total


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None) -> _Pair:
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    result, statistics, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return result, statistics


def _backward(
    tensors: Sequence[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    statistics: torch.Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient, query, result = tensors
    handed = gradient, query, key, value, result, statistics.contiguous()  # CUDA's kernel ignores strides
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*handed, 0.0, causal, scale=scale)
    # no sequences of different lengths, and no dropout, whose generator state `seed` would be
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    lengths = query.shape[-2], key.shape[-2]
    return _aten._scaled_dot_product_flash_attention_backward(
        *handed, None, None, *lengths, 0.0, causal, seed, torch.zeros_like(seed), scale=scale
    )
