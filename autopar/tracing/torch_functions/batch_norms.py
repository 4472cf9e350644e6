"""Batch norms whose own forward cannot be traced: synchronised ones, and those with a cumulative average."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.tracing.patching import attributes_set

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


def _traceable(module: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """The forward of a batch norm; a cumulative average is computed from the number of batches as a tensor."""
    mean, var, seen = module.running_mean, module.running_var, module.num_batches_tracked
    averages = module.training and module.track_running_stats and module.momentum is None
    if not averages or mean is None or var is None or seen is None:
        return _forward(module, input)
    module._check_input_dim(input)
    seen.add_(1)
    own_mean, own_var = torch.zeros_like(mean), torch.zeros_like(var)
    result = F.batch_norm(input, own_mean, own_var, module.weight, module.bias, True, 1.0, module.eps)
    part = seen.to(mean.dtype).reciprocal()
    mean.lerp_(own_mean, part)
    var.lerp_(own_var, part)
    return result
