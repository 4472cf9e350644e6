"""`torch.autocast` around a call, set by the user's loop: a plan only counts the dtypes of its `precision`."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import AUTOCAST
from autopar.user_warnings import warn


def outer_autocast(graph: fx.Graph, device: torch.device) -> dict[str, str]:
    """The autocast state, which must be equal on all ranks; warns if it is on but was off when `graph` was traced."""
    kind = device.type
    if not torch.is_autocast_enabled(kind):
        return {"torch.autocast around the call": "off"}
    dtype = str(torch.get_autocast_dtype(kind))
    if not any(node.meta.get(AUTOCAST) for node in graph.nodes):
        warn(
            f"torch.autocast ({dtype}) is on around a planned model, whose ops then run in dtypes that its plan does "
            'not count: plan with precision="bf16" (fp32 parameters, bf16 compute) and leave autocast out'
        )
    return {"torch.autocast around the call": dtype}
