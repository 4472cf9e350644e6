"""The work that `autopar profile` times on a device: the kinds of work of a training step, each with its amount.

The cost model (`autopar.cost`) counts the amounts, so that the measured rates are those by which it divides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.cost.ops.measure import measure
from autopar.cost.ops.products import busy_flops
from autopar.runtime.communication.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from autopar.runtime.communication.route import Route
from autopar.runtime.communication.transit import Transit
from autopar.runtime.gradients.accumulation import Accumulation
from autopar.runtime.stored.parameters import local_of

DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}
_LARGEST_PRODUCT = {"cpu": 1024, "cuda": 8192}  # rows and columns of a square product, at most
_ACTIVATION = {"cpu": (512, 512), "cuda": (8192, 4096)}  # shape of the tensors of pointwise ops
_HIDDEN_ELEMENTS = {"cpu": 3 << 18, "cuda": 1 << 25}  # of the pointwise ops between two collectives
_ATTENTION = {"cpu": (2, 4, 256, 64), "cuda": (4, 16, 2048, 128)}  # batch, heads, sequence, head dim
_UPDATED_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}  # of the parameter in an optimizer step
_COLD_BYTES = 64 << 20  # operands through which a probe cycles, so that a cache does not hold the next ones
_COLLECTIVE_BYTES = {  # of the whole tensor
    "cpu": (4 << 10, 32 << 20, 1 << 20, 64 << 10, 8 << 20),
    "cuda": (64 << 10, 128 << 20, 1 << 20, 16 << 20),
}  # the smallest and the largest first: the sizes after them are skipped if time is short


@dataclass(frozen=True)
class Probe:
    """A call to time, and the amount of its work: FLOPs (`busy_flops`), bytes, kernels or parameters."""

    name: str
    amount: float
    run: Callable[[], Any]


def processors(kind: str) -> int:
    return torch.cuda.get_device_properties().multi_processor_count if kind == "cuda" else 1


def product(kind: str, dtype: torch.dtype, size: int) -> Probe:
    """A square matrix product, with other operands in each call; its amount is in FLOPs."""
    count = max(2, min(64, _COLD_BYTES // (2 * size * size * dtype.itemsize)))
    pairs = [[torch.randn(size, size, dtype=dtype, device=kind) for _ in range(2)] for _ in range(count)]
    amount = busy_flops(kind, processors(kind), 1, size, size, size)
    return Probe(f"{_name(dtype)} products", amount, _in_turn(torch.mm, pairs))


def _in_turn(call: Callable[..., Any], arguments: Sequence[Sequence[torch.Tensor]]) -> Callable[[], Any]:
    """A call that cycles through `arguments`, so that they are not in a cache, as most tensors in a step are not."""
    following = itertools.cycle(arguments)
    return lambda: call(*next(following))


def products(kind: str, dtype: torch.dtype) -> list[Probe]:
    """Probes of square products, from small to large."""
    sizes = [size for size in (128, 256, 512, 1024, 2048, 4096, 8192) if size <= _LARGEST_PRODUCT[kind]]
    return [product(kind, dtype, size) for size in sizes]


def attention(kind: str) -> Probe:
    """Fused causal attention, forward and backward; its amount is in FLOPs, as `cost.ops.kernels` counts them."""
    batch, heads, sequence, width = _ATTENTION[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    q, k, v = (
        torch.randn(batch, heads, sequence, width, dtype=dtype, device=kind, requires_grad=True) for _ in range(3)
    )

    def run() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    forward = busy_flops(kind, processors(kind), 1, batch * heads * sequence, width, sequence)
    return Probe("attention", 3.5 * forward, run)


def pointwise(kind: str) -> Probe:
    """Pointwise ops, norms and a softmax as in a transformer block, forward and backward; its amount is in bytes."""
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    shape = _ACTIVATION[kind]

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(x, shape[1:], w, w)
        y = F.gelu(y) * x + torch.tanh(y)
        z = torch.softmax(y, -1) + F.silu(x)
        return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-6)

    def run(x: torch.Tensor, w: torch.Tensor) -> None:
        torch.autograd.grad(chain(x, w), (x, w), torch.ones_like(x))

    def leaves(device: str) -> list[torch.Tensor]:
        return [torch.ones(s, dtype=dtype, device=device, requires_grad=True) for s in (shape, shape[1:])]

    meta_leaves = leaves("meta")
    counted = measure(lambda: chain(*meta_leaves), meta_leaves)
    moved = counted.forward.moved_bytes + counted.backward.moved_bytes
    device_leaves = [leaves(kind) for _ in range(max(2, _COLD_BYTES // meta_leaves[0].nbytes))]
    return Probe("pointwise", moved, _in_turn(run, device_leaves))


def launch(kind: str) -> Probe:
    """Forward and backward of a block, including its views, so small that launches take all the time; in kernels."""

    def block(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(4):
            q, k, value = F.linear(F.layer_norm(y, (12,), v, v), w).view(1, 2, 3, 12).transpose(1, 2).chunk(3, dim=-1)
            mixed = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(2, 3)), -1), value)
            y = y + F.gelu(mixed.transpose(1, 2).reshape(1, 2, 12)) * 0.5
        return y

    def leaves(device: str) -> list[torch.Tensor]:
        shapes = ((1, 2, 12), (36, 12), (12,))
        return [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]

    meta_leaves, device_leaves = leaves("meta"), leaves(kind)
    counted = measure(lambda: block(*meta_leaves), meta_leaves)

    def run() -> None:
        torch.autograd.grad(block(*device_leaves).sum(), device_leaves)

    return Probe("launches", counted.forward.kernels + counted.backward.kernels, run)


def update(kind: str) -> Probe:
    """A fused step of AdamW; in bytes: parameter and two moments are read and written, the gradient is read."""
    parameter = torch.nn.Parameter(torch.ones(_UPDATED_ELEMENTS[kind], device=kind))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return Probe("optimizer", (2 * 3 + 1) * parameter.nbytes, optimizer.step)


def parameters(mesh: DeviceMesh) -> tuple[Probe, Probe]:
    """Reading parameters and accumulating their gradients: stored as the runtime does, and plain; in parameters."""
    count = 16
    plain = [torch.nn.Parameter(torch.ones(4, device=mesh.device_type)) for _ in range(count)]
    whole = [Replicate()] * mesh.ndim
    stored = [torch.nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, whole, run_check=False)) for p in plain]

    def run(tensors: Sequence[torch.Tensor]) -> None:
        transit = Transit(Route(), [], tensors, Accumulation(1))
        read = [local_of(parameter, transit, place, str(place)) for place, parameter in enumerate(tensors)]
        torch.autograd.backward(read, [tensor.detach() for tensor in read])
        for parameter in tensors:
            parameter.grad = None

    return Probe("parameters", count, partial(run, stored)), Probe("plain parameters", count, partial(run, plain))


def between(kind: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Work in place of the ops between two collectives: a product, and pointwise ops on tensors not in a cache."""
    elements = _HIDDEN_ELEMENTS[kind]
    activations = [[torch.randn(elements, device=kind)] for _ in range(max(2, _COLD_BYTES // (4 * elements)))]
    pointwise = _in_turn(lambda x: F.gelu(x, approximate="tanh") * torch.tanh(x), activations)
    return product(kind, torch.float32, 512).run, pointwise


def collectives(kind: str, size: int, group: str) -> list[list[tuple[str, int, Callable[[], Any]]]]:
    """The runtime's collectives over one axis, as lists of equal size: (kind, input bytes of a rank, call).

    Tensors are sharded on a dim other than the first, so that the calls include the copies that split or join pieces.
    """
    calls: list[list[tuple[str, int, Callable[[], Any]]]] = []
    for total in _COLLECTIVE_BYTES[kind]:
        rows, columns = 16, math.ceil(total / 4 / size / 16)
        whole = torch.ones(rows, size * columns, device=kind)
        shard, split = whole[:, :columns].contiguous(), [rows * columns] * size
        calls.append(
            [
                ("all_reduce", whole.nbytes, partial(all_reduce, whole, "sum", group)),
                ("all_gather", shard.nbytes, partial(_gather, shard, size, group)),
                ("reduce_scatter", whole.nbytes, partial(_scatter, whole, size, group)),
                ("all_to_all", whole.nbytes, partial(_exchange, whole, size, split, group)),
            ]
        )
    return calls


def _gather(shard: torch.Tensor, size: int, group: str) -> torch.Tensor:
    pieces = all_gather(shard.clone(), size, group)
    return pieces.transpose(0, 1).reshape(shard.shape[0], -1)


def _scatter(whole: torch.Tensor, size: int, group: str) -> torch.Tensor:
    pieces = whole.view(whole.shape[0], size, -1).transpose(0, 1).contiguous()
    return reduce_scatter(pieces, size, group).clone()


def _exchange(whole: torch.Tensor, size: int, split: list[int], group: str) -> torch.Tensor:
    pieces = whole.view(whole.shape[0], size, -1).transpose(0, 1).reshape(-1)
    return all_to_all(pieces, split, split, group).clone()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
