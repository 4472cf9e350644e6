"""In-place ops on lists of DTensors (`torch._foreach_add_`, and so optimizer steps) increment each one's version.

torch (2.13) does so only for ops on a single DTensor. So a step between forward and backward went unnoticed, and
backward used the new values.

torch also refuses lists of DTensors and plain tensors, such as the values of a state_dict with buffers, to which
averages of models apply `torch._foreach_lerp_`. They run as two lists.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensors.own_way import in_torchs_own_way


@functools.cache
def count_writes_into_lists() -> None:
    """From now on, count them; once a process. The dispatcher is private: torch has no public way to set how ops
    run."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for op in _writing_lists():
        handlers.setdefault(op, _counted)


def _writing_lists() -> list[OpOverload[..., Any]]:
    """In-place ops on lists of tensors, without those of fused optimizers, for which torch counts no versions."""
    ops = []
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::_foreach_") and packet.endswith("_"):
            ops.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return ops


def _counted(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kinds = [isinstance(one, DTensor) for one in args[0]]
    if any(kinds) and not all(kinds):
        sharded, plain = (_those(kind, kinds, args, kwargs) for kind in (True, False))
        op_call(*plain[0], **plain[1])
        return _counted(op_call, *sharded)
    result = in_torchs_own_way(op_call, args, kwargs)
    increment_version([tensor for tensor in args[0] if isinstance(tensor, DTensor) and not tensor.is_inference()])
    return result


def _those(kind: bool, kinds: list[bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with only the elements of lists at the places of this kind."""

    def chosen(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            return value
        return [one for one, its in zip(value, kinds, strict=True) if its is kind]

    return tuple(map(chosen, args)), {name: chosen(value) for name, value in kwargs.items()}
