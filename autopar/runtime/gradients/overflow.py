"""An overflow that `torch.amp.GradScaler` finds in one rank's part of a gradient is found on all ranks.

A scaler checks all gradients at once. torch's own code for DTensors (2.13) combines the ranks' findings by the layout
of the first gradient: where that is replicated (a norm's weight under `tp`, a scalar under `fsdp`), a rank whose parts
are finite takes the step that the others skip, and copies and scales differ from then on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from autopar.runtime.ranks.failures import collective_error


@functools.cache
def find_overflows_everywhere() -> None:
    """From now on, combine findings over every mesh axis that shards some gradient. Once a process.

    The dispatcher is private: torch has no public way to say how an op runs on DTensors.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscaled


def _unscaled(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gradients, overflows, scale = args
    op_call([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], overflows, scale, **kwargs)
    split = {
        (gradient.device_mesh, axis): None
        for gradient in gradients
        if isinstance(gradient, DTensor)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    }
    try:
        for mesh, axis in split:
            dist.all_reduce(overflows, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    except RuntimeError as error:
        raise collective_error("what a gradient scaler has found on each rank", error) from error
