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
from torch.utils._pytree import tree_leaves, tree_map

from autopar.runtime.dtensors.joined_parts import joined_placements, whole
from autopar.runtime.dtensors.lost_writes import refuse_lost_write
from autopar.runtime.ranks.failures import collective_error

_aten = torch.ops.aten
_FILL = (
    *(_aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.exponential_, _aten.random_),
    *(_aten.cauchy_, _aten.log_normal_, _aten.geometric_),
)
_LIKE = (_aten.rand_like, _aten.randn_like, _aten.randint_like)
_OF_VALUES = (
    *(_aten.bernoulli, _aten.native_dropout, _aten.normal, _aten.multinomial, _aten.poisson, _aten.binomial),
    *(_aten._standard_gamma, _aten._sample_dirichlet),
)


@functools.cache
def draw_whole() -> None:
    """From now on, every rank draws the whole of a DTensor and keeps its part, with rank 0's values. Once a process.

    All ranks draw, so that their generators stay in step. Each rank holds the whole while it draws, one tensor at a
    time.
    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for packets, handler in ((_FILL, _fill), (_LIKE, _like), (_OF_VALUES, _of_values)):
        for packet in packets:
            for overload in packet.overloads():
                if "out" not in overload:
                    handlers.setdefault(getattr(packet, overload), handler)


def _fill(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor: DTensor = args[0]
    refuse_lost_write(op_call, tensor)
    drawn = op_call(_empty(tensor), *tree_map(whole, args[1:]), **tree_map(whole, kwargs))
    dealt = _dealt(drawn, tensor.device_mesh, tensor.placements)
    tensor._local_tensor.copy_(dealt._local_tensor)
    return tensor


def _like(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, *arguments = args
    drawn = op_call(_empty(tensor), *tree_map(whole, arguments), **kwargs)
    return _dealt(drawn, tensor.device_mesh, tensor.placements)


def _of_values(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    results = op_call(*tree_map(whole, args), **tree_map(whole, kwargs))
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
