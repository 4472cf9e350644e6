"""The mesh as one rank sees it, and the collectives over one of its axes.

Collectives are the traceable operators `torch.ops._c10d_functional`, which name a process group by a string,
so that `torch.compile` sees them and whatever holds a group's name can be copied. Those that do not begin
with `begin` return a new tensor, ready to use. None of them is differentiable by itself: `convert`, the
buckets and the local ops pair each with its conjugate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.failures import failure
from autopar.runtime.ranges import named

ReduceOp = Literal["sum", "max", "min"]


@dataclass
class Waits:
    """For how long this process has stood waiting for collectives; on a GPU streams wait, which does not show here."""

    seconds: float = 0.0


waits = Waits()


@dataclass(frozen=True)
class LocalMesh:
    """Shape of the mesh, this rank's coordinate on it, and the name of its process group along each axis."""

    shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[str, ...]

    @staticmethod
    def of(mesh: DeviceMesh) -> LocalMesh:
        """The view of the calling process; its rank must be part of `mesh`."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this process is no part of {mesh}")
        groups = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        return LocalMesh(tuple(mesh.shape), tuple(coordinate), groups)


def all_reduce(tensor: torch.Tensor, op: ReduceOp, group: str) -> torch.Tensor:
    """Sum, maximum or minimum over the group, on every rank of it."""
    functional = torch.ops._c10d_functional
    return wait(functional.all_reduce(tensor.contiguous(), op, group), "all_reduce", group)


def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The `size` ranks' tensors (of equal shape) in rank order along a new leading dim."""
    return wait(begin_all_gather(tensor, size, group), "all_gather", group)


def reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Of a tensor with leading dim `size`: the ranks' sum of the part that bears this rank's number."""
    return wait(begin_reduce_scatter(tensor, size, group), "reduce_scatter", group)


def all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    """Exchange pieces of a 1-D tensor: `sent[r]` elements go to rank r, `received[r]` come from it."""
    return wait(begin_all_to_all(tensor, sent, received, group), "all_to_all", group)


# The same in the background. What they return may be read after `wait`, and what they were given must not change until.


def wait(tensor: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    """The tensor, once the collective that writes its storage has ended (on a GPU: for what is queued behind).

    Raises CollectiveError, which names the collective by `kind` and `group`, where it fails or times out.
    """
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(tensor)
    start = time.perf_counter()
    try:
        with named(f"wait for {kind}"):
            return torch.ops._c10d_functional.wait_tensor(tensor)
    except RuntimeError as error:  # DistBackendError is one
        raise failure(kind, group, tensor, error) from error
    finally:
        waits.seconds += time.perf_counter() - start


def begin_all_reduce_(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """The sum, in place."""
    return torch.ops._c10d_functional.all_reduce_(tensor, "sum", group)


def begin_all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    # `all_gather_into_tensor` asks gloo for a coalesced gather, several of which at once write into freed memory
    # (torch 2.13); with `_out` it takes another way, and is the same over NCCL
    piece = tensor.contiguous().view(-1)
    whole = piece.new_empty(size * piece.numel())
    torch.ops._c10d_functional.all_gather_into_tensor_out(piece, size, group, out=whole)
    return whole.view(size, *tensor.shape)


def begin_reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    part = torch.ops._c10d_functional.reduce_scatter_tensor(tensor.contiguous(), "sum", size, group)
    return part.view(tensor.shape[1:])


def begin_all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    return torch.ops._c10d_functional.all_to_all_single(tensor.contiguous(), list(received), list(sent), group)
