"""Random numbers that a loop draws into DTensors are those of one process: `torch.nn.init`, noise on weights, dropout.

On GPUs, torch gives each rank its share of one sequence. On the CPU (2.13), each rank draws for its shard from its own
generator: with the same seed on all ranks all shards are equal; with different seeds the copies of a replicated
parameter differ.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from autopar.runtime.dtensors.joined_parts import joined_placements
from autopar.runtime.dtensors.lost_writes import refuse_lost_write
from autopar.runtime.ranks.failures import collective_error

_aten = torch.ops.aten
_FILL = (
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
)
_LIKE = (_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype)
_OF_VALUES = (_aten.bernoulli.default, _aten.native_dropout.default)


@functools.cache
def draw_whole() -> None:
    """From now on, every rank draws the whole of a DTensor and keeps its part, with rank 0's values. Once a process.

    All ranks draw, so that their generators stay in step. Each rank holds the whole while it draws, one tensor at a
    time.
    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for ops, handler in ((_FILL, _fill), (_LIKE, _like), (_OF_VALUES, _of_values)):
        for op in ops:
            handlers.setdefault(op, handler)


def _fill(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    refuse_lost_write(op_call, tensor)
    dealt = _dealt(op_call(_empty(tensor), *args[1:], **kwargs), tensor.device_mesh, tensor.placements)
    tensor._local_tensor.copy_(dealt._local_tensor)
    return tensor


def _like(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, *arguments = args
    return _dealt(op_call(_empty(tensor), *arguments, **kwargs), tensor.device_mesh, tensor.placements)


def _of_values(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *arguments = args
    results = op_call(tensor.full_tensor(), *arguments, **kwargs)
    if isinstance(results, torch.Tensor):
        return _dealt(results, tensor.device_mesh, tensor.placements)
    return tuple(_dealt(result, tensor.device_mesh, tensor.placements) for result in results)


def _empty(tensor: DTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)


def _dealt(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    try:
        return distribute_tensor(whole, mesh, joined_placements(placements), src_data_rank=0)
    except RuntimeError as error:
        raise collective_error("random numbers for a sharded tensor, which every rank draws,", error) from error
