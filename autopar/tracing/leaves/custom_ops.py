"""Custom operators whose data-free kernel reads data: two runs on random data tell the outputs' shapes.

`torch.library` asks for a fake kernel; that of a Triton kernel which is interpreted on the CPU runs the kernel. Such an
operator runs twice, on different random tensors of the same shapes. If both results have the same look, and the
operands are small enough for a trial, their shapes and dtypes are used. An operator without a fake kernel is an error
that names it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.leaves.opaque import SMALL
from autopar.tracing.values import result_like

Tensor = torch.Tensor
_OF_TORCH = ("aten", "prim", "prims", "quantized", "profiler", "higher_order")  # namespaces


def outputs_of_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Data-free outputs of a custom operator for data-free arguments; None for others, or if a trial fails."""
    if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    name = func._schema.name if isinstance(func, torch._ops.OpOverload) else func._qualified_op_name
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name.partition("::")[0] in _OF_TORCH or sum(t.numel() for t in tensors) > SMALL:
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            first, second = (_run(func, args, kwargs) for _ in range(2))
    except Exception:  # the operator does not run on random data; the caller reports the missing kernel
        return None
    looks = [pytree.tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), run) for run in (first, second)]
    return pytree.tree_map_only(Tensor, result_like, first) if looks[0] == looks[1] else None


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*pytree.tree_map_only(Tensor, _random, args), **pytree.tree_map_only(Tensor, _random, kwargs))


def _random(tensor: Tensor) -> Tensor:
    real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.float64).uniform_(0, 1).to(tensor.dtype)
    return real.requires_grad_(tensor.requires_grad)
