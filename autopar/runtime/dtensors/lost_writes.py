"""In-place ops on parts of DTensors (`weight[0].zero_()`), and on plain tensors with DTensors (`total.add_(norm)`).

Where a view needs elements of several ranks, torch (2.11 to 2.15) takes it of a gathered copy. A write into it is then
lost, without an error. And torch fails after it has written a DTensor's value into a plain number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.errors import InputError


@functools.cache
def refuse_lost_writes() -> None:
    """From now on, such a write into a view raises InputError, and one into a plain number succeeds; once a process.

    The dispatcher is private. It looks this method up once, at the first op in place on a DTensor in the process.
    """
    kind: Any = type(DTensor._op_dispatcher)
    kind._dispatch_fast_path_python_tail = _checked(kind._dispatch_fast_path_python_tail)


def refuse_lost_write(op_call: OpOverload[..., Any], tensor: torch.Tensor) -> None:
    """Raise InputError if the tensor is a view of a DTensor that does not share its memory."""
    base = tensor._base if isinstance(tensor, DTensor) and tensor._is_view() else None
    if isinstance(base, DTensor) and not torch._C._is_alias_of(tensor._local_tensor, base._local_tensor):  # type: ignore[attr-defined]
        name = op_call._schema.name.removeprefix("aten::")
        raise InputError(
            f"{name} writes into a view of shape {tuple(tensor.shape)} of a parameter, gradient or state of shape "
            f"{tuple(base.shape)}, which is sharded so that the view is a gathered copy, and the write would be lost: "
            "write all of it (tensor.copy_(value), tensor.mul_(mask)), or keep it whole by constraints='param:... = R'"
        )


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def tail(dispatcher: Any, op_call: OpOverload[..., Any], args: tuple[Any, ...], *others: Any) -> Any:
        if op_call._schema.name.endswith("_"):
            written = args[0]
            if isinstance(written, torch.Tensor):
                refuse_lost_write(op_call, written)
                if not isinstance(written, DTensor):
                    return written
            else:
                for tensor in written:
                    refuse_lost_write(op_call, tensor)
        return own(dispatcher, op_call, args, *others)

    return tail
