"""Batch norms whose own forward cannot be traced (synchronised ones, those with a cumulative average), and the dtype of
their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.ops.norms import AFFINE, NORMS, RUNNING, named
from autopar.tracing.patching import attributes_set

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

_forward = _BatchNorm.forward


@contextlib.contextmanager
def batch_norms_traceable() -> Iterator[None]:
    """While inside, `nn.SyncBatchNorm` runs as an ordinary batch norm.

    In a plan all statistics are those of the global batch, while its own forward requires GPU data and communicates.
    With `momentum=None` (set by `torch.optim.swa_utils.update_bn`), the number of batches stays a tensor instead of
    being read.
    """
    with attributes_set(_BatchNorm, forward=_traceable), attributes_set(nn.SyncBatchNorm, forward=_traceable):
        yield


def with_wide_weights(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Record a norm with its weights in the dtype of its running statistics, if that is wider.

    Weights are read in the compute dtype, while running statistics are buffers, which keep their own dtype. Torch takes
    half-precision weights only with half-precision statistics, but takes float32 weights with a half-precision input.
    """
    arguments = named(func, args, kwargs)
    running = arguments.get(RUNNING[0])
    for name in AFFINE:
        tensor = arguments.get(name)
        if tensor is not None and running is not None and tensor.dtype.itemsize < running.dtype.itemsize:
            arguments[name] = recorder.record(torch.Tensor.to, tensor, running.dtype)
    positional = [arguments.pop(name) for name in NORMS[func][: len(args)]]
    return recorder.record(func, *positional, **arguments)


def _traceable(module: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """The forward of a batch norm; a cumulative average is computed from the number of batches as a tensor."""
    mean, var, batches = module.running_mean, module.running_var, module.num_batches_tracked
    averages = module.training and module.track_running_stats and module.momentum is None
    if not averages or mean is None or var is None or batches is None:
        return _forward(module, input)
    module._check_input_dim(input)
    batches.add_(1)
    own_mean, own_var = torch.zeros_like(mean), torch.zeros_like(var)
    result = F.batch_norm(input, own_mean, own_var, module.weight, module.bias, True, 1.0, module.eps)
    part = batches.to(mean.dtype).reciprocal()
    mean.lerp_(own_mean, part)
    var.lerp_(own_var, part)
    return result
