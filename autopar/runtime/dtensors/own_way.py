"""Torch's own way to run an op on DTensors, from within what stands in for it."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor


def in_torchs_own_way(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch makes of it: its own way is taken where there is no handler (another thread may be there)."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(op_call, None)
    try:
        return op_call(*args, **kwargs)
    finally:
        if own is not None:
            handlers[op_call] = own
