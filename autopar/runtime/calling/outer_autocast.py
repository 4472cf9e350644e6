"""`torch.autocast` that the user's loop has on around a call: a plan counts the dtypes of its `precision` alone."""

from __future__ import annotations

import torch
from torch import fx

from autopar.graph import AUTOCAST
from autopar.user_warnings import warn


def outer_autocast(graph: fx.Graph, device: torch.device) -> dict[str, str]:
    """What ranks must have alike; a UserWarning where autocast is on and was not when `graph` was traced."""
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
