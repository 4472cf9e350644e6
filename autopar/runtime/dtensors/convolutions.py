"""Convolutions of DTensors that loops call on outputs and parameters of a planned model.

torch (2.11 to 2.15) takes any sharded dim for the last one, and exchanges its borders: where a batch, channels or
another dim lies sharded, the op fails, gives a wrong result, or makes ranks wait for each other. Here weights are
gathered, and so is the input, unless it is sharded on the batch alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_aten = torch.ops.aten


@functools.cache
def mend_convolutions() -> None:
    """From now on, they give on DTensors what they give on whole tensors. Once a process.

    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten.convolution.default] = _forward
    handlers[_aten.convolution_backward.default] = _backward


def _forward(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, weight, bias, *options = args
    _check(tensor)
    batch = _batch_placements(tensor)
    whole = [None if each is None else _local(each, tensor, _replicated(tensor)) for each in (weight, bias)]
    found = op_call(_local(tensor, tensor, batch), *whole, *options, **kwargs)
    return _of_rows(found, tensor, batch)


def _backward(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    gradient, tensor, weight, *options = args
    _check(tensor)
    batch = _batch_placements(tensor)
    of_input, *of_weights = op_call(
        _local(gradient, tensor, batch),
        _local(tensor, tensor, batch),
        _local(weight, tensor, _replicated(tensor)),
        *options,
        **kwargs,
    )
    summed = [Partial() if placement.is_shard() else placement for placement in batch]
    return (
        None if of_input is None else _of_rows(of_input, tensor, batch),
        *(None if part is None else _wrapped(part, tensor, summed, part.shape) for part in of_weights),
    )


def _replicated(tensor: DTensor) -> list[Placement]:
    return [Replicate()] * tensor.device_mesh.ndim


def _batch_placements(tensor: DTensor) -> list[Placement]:
    """The placements of the input that are on its batch; none if some rank would have no row."""
    ranks = 1
    for axis, placement in enumerate(tensor.placements):
        ranks *= tensor.device_mesh.size(axis) if placement == Shard(0) else 1
    if tensor.shape[0] % ranks:
        return _replicated(tensor)
    return [placement if placement == Shard(0) else Replicate() for placement in tensor.placements]


def _check(value: Any) -> None:
    if not isinstance(value, DTensor):
        raise RuntimeError(
            "aten.convolution got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
        )


def _local(value: Any, like: DTensor, placements: Sequence[Placement]) -> torch.Tensor:
    _check(value)
    part: torch.Tensor = value.detach().redistribute(like.device_mesh, placements)._local_tensor
    return part


def _of_rows(part: torch.Tensor, like: DTensor, batch: Sequence[Placement]) -> DTensor:
    return _wrapped(part, like, batch, torch.Size([like.shape[0], *part.shape[1:]]))


def _wrapped(part: torch.Tensor, like: DTensor, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part.contiguous(), like.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
