"""`torch.equal` and `torch.allclose` of a DTensor with one of another layout or shape, or with a plain tensor.

torch has no rule for `allclose`, and its rule for `equal` fails if the layouts differ, as those of any two parameters
of a planned model may (Lightning's BaseFinetuning searches for a parameter in this way). A plain tensor is taken for
the whole. The answer is the same on all ranks, even if one of them holds another value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

EQUAL, ALLCLOSE = torch.ops.aten.equal.default, torch.ops.aten.allclose.default


def compared(op_call: OpOverload[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
    """Whether the op is true for the whole tensors; called on every rank."""
    left, right, *options = args
    if op_call is EQUAL and left.shape != right.shape:
        return False
    first: DTensor = left if isinstance(left, DTensor) else right
    mesh, to = first.device_mesh, tuple(first.placements)
    if left.shape != right.shape or any(type(placement) not in (Shard, Replicate) for placement in to):
        to = (Replicate(),) * mesh.ndim
    with torch.no_grad():
        parts = _part(left, mesh, to), _part(right, mesh, to)
        holds = torch.tensor(int(bool(op_call(*parts, *options, **kwargs))), device=first.device)
    for axis in range(mesh.ndim):
        dist.all_reduce(holds, dist.ReduceOp.MIN, group=mesh.get_group(axis))
    return bool(holds.item())


def _part(tensor: torch.Tensor, mesh: DeviceMesh, to: tuple[Placement, ...]) -> torch.Tensor:
    tensor = tensor.detach()  # torch 2.11 moves nothing in here that needs a gradient
    if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
        tensor = tensor.full_tensor()
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    return tensor.redistribute(placements=to).to_local()
