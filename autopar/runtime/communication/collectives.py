"""The mesh as one rank sees it, and the collectives over one of its axes.

Collectives are called as `torch.ops._c10d_functional` operators, which name their process group by a string, so that
`torch.compile` can trace them and objects that hold a group's name can be copied. The functions `begin_...` only launch
a collective; the others wait and return a new tensor, ready to use. None of them is differentiable by itself:
`convert`, the buckets and the local ops pair each with its conjugate. Complex tensors are sent as pairs of real
numbers, since gloo and NCCL do not support complex dtypes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.ranges import named
from autopar.runtime.ranks.failures import failure

ReduceOp = Literal["sum", "max", "min"]
# Before 2.13, torch.compile fails on an operator that returns its `out` argument. (The comparison is one of versions,
# not of text.)
_COMPILES_OUT = torch.__version__ >= "2.13"


@dataclass
class Waits:
    """How long this process has been blocked waiting for collectives; on a GPU, streams wait, which is not counted."""

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
    """Sum, maximum or minimum over the group, on every rank of it; NaN if a rank has NaN, as on one device."""
    if op != "sum" and tensor.is_floating_point():
        return _extreme(tensor, op, group)
    reduced = torch.ops._c10d_functional.all_reduce(_sent(tensor), op, group)
    return _received(wait(reduced, "all_reduce", group), tensor)


def _extreme(tensor: torch.Tensor, op: ReduceOp, group: str) -> torch.Tensor:
    """gloo's maximum of 1 and NaN is either, by the order of ranks. So integers in the order of the numbers are sent,
    of which NaN is the largest."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    upward = wide if op == "max" else -wide
    integers = torch.int64 if wide.dtype == torch.float64 else torch.int32
    ordered = _ordered(upward.masked_fill(upward.isnan(), math.nan).view(integers))
    largest = _ordered(all_reduce(ordered, "max", group)).view(wide.dtype)
    return (largest if op == "max" else -largest).to(tensor.dtype)


def _ordered(bits: torch.Tensor) -> torch.Tensor:
    """The bits of floating numbers as integers in the order of these numbers, and back: those of negative numbers are
    otherwise in the reverse order."""
    return torch.where(bits < 0, bits ^ ((1 << 8 * bits.element_size() - 1) - 1), bits)


def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """The `size` ranks' tensors (of equal shape) in rank order along a new leading dim."""
    return wait(begin_all_gather(tensor, size, group), "all_gather", group)


def reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """For a tensor with leading dim `size`: the sum over ranks of the slice at this rank's index."""
    return wait(begin_reduce_scatter(tensor, size, group), "reduce_scatter", group)


def all_to_all(tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: str) -> torch.Tensor:
    """Exchange pieces of a 1-D tensor: `sent[r]` elements go to rank r, `received[r]` come from it."""
    return wait(begin_all_to_all(tensor, sent, received, group), "all_to_all", group)


# The same in the background: a result may be read only after `wait`, and the input must not change until then.


def wait(tensor: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    """The tensor, after waiting for the collective that writes it (on a GPU, only work queued afterwards waits).

    Raises CollectiveError, which names the collective by `kind` and `group`, if it fails or times out.
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
    """The sum over ranks of a contiguous tensor, in place."""
    return _received(torch.ops._c10d_functional.all_reduce_(_sent(tensor), "sum", group), tensor)


def begin_all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    # `all_gather_into_tensor` makes gloo run a coalesced gather, and several of those at once write into freed memory
    # (torch 2.13); the `_out` variant takes another path in gloo, and is the same over NCCL
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
    """The tensor to send: contiguous, with real numbers. A lazy conjugate (gradients of complex tensors often are one)
    is computed first: it is a view with a flag, which `contiguous` keeps."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _received(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A received tensor in the dtype of `like`: the inverse of `_sent`, as a view."""
    return torch.view_as_complex(values.view(-1, 2) if values.dim() == 1 else values) if like.is_complex() else values
