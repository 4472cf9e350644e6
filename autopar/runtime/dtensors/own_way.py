"""torch's own implementation of an op on DTensors, called from the handler that replaces it."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor


def in_torchs_own_way(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's implementation of an op: with the handler removed (another thread may have removed it already)."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(op_call, None)
    try:
        return op_call(*args, **kwargs)
    finally:
        if own is not None:
            handlers[op_call] = own
