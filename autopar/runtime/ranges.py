"""Ranges in `torch.profiler` traces, named as the plan names things; free where no profiler runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NONE = nullcontext()


def named(name: str) -> AbstractContextManager[object]:
    """A profiler range, if a profiler runs; none in compiled graphs, whose compiler makes its own."""
    if torch.compiler.is_compiling() or not torch._C._autograd._profiler_enabled():
        return _NONE
    return record_function(f"autopar: {name}")
