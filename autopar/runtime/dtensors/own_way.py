"""torch's own implementation of an op on DTensors, called from the handler that replaces it."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

_TORCHS_HANDLERS = dict(DTensor._op_dispatcher._custom_op_handlers)  # of `argmax`, say; autopar's are not there yet


def in_torchs_own_way(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's implementation of an op: with the handler removed (another thread may have removed it already), or
    with torch's own."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(op_call, None)
    if op_call in _TORCHS_HANDLERS:
        handlers[op_call] = _TORCHS_HANDLERS[op_call]
    try:
        return op_call(*args, **kwargs)
    finally:
        if own is not None:
            handlers[op_call] = own
