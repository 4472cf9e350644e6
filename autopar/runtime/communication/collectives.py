"""The mesh as one rank sees it, and the collectives over one of its axes.

Collectives are the traceable operators `torch.ops._c10d_functional`, which name a process group by a string,
so that `torch.compile` sees them and whatever holds a group's name can be copied. Those that do not begin
with `begin` return a new tensor, ready to use. None of them is differentiable by itself: `convert`, the
buckets and the local ops pair each with its conjugate. Complex numbers travel as pairs of real ones, since gloo and
NCCL know no others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.ranges import named
from autopar.runtime.ranks.failures import failure

ReduceOp = Literal["sum", "max", "min"]
# Before, no compiler takes an operator that returns what it writes into. (It compares as a version, not as text.)
_COMPILES_OUT = torch.__version__ >= "2.13"


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
    reduced = torch.ops._c10d_functional.all_reduce(_sent(tensor), op, group)
    return _received(wait(reduced, "all_reduce", group), tensor)


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
    """The sum, in place, of a contiguous tensor."""
    return _received(torch.ops._c10d_functional.all_reduce_(_sent(tensor), "sum", group), tensor)


def begin_all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    # `all_gather_into_tensor` asks gloo for a coalesced gather, several of which at once write into freed memory
    # (torch 2.13); with `_out` it takes another way, and is the same over NCCL
    piece, functional = _sent(tensor).view(-1), torch.ops._c10d_functional
    if torch.compiler.is_compiling() and not _COMPILES_OUT:
        whole = functional.all_gather_into_tensor(piece, size, group)
    else:
        whole = piece.new_empty(size * piece.numel())
        functional.all_gather_into_tensor_out(piece, size, group, out=whole)
    return _received(whole, tensor).view(size, *tensor.shape)


def begin_reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    part = torch.ops._c10d_functional.reduce_scatter_tensor(_sent(tensor), "sum", size, group)
    return _received(part, tensor).view(tensor.shape[1:])


def begin_all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    values = 2 if tensor.is_complex() else 1
    counts = [[count * values for count in side] for side in (received, sent)]
    flat = torch.ops._c10d_functional.all_to_all_single(_sent(tensor).view(-1), *counts, group)
    return _received(flat, tensor)


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """What travels: the values as they lie in memory, so that a conjugate (gradients of complex tensors often are one),
    which is a view with a note to itself that `contiguous` keeps, is computed first."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _received(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What `_sent` has made of tensors of the dtype of `like`, as such a tensor again; a view."""
    return torch.view_as_complex(values.view(-1, 2) if values.dim() == 1 else values) if like.is_complex() else values
