"""Norms with running statistics: `torch` and `torch.nn.functional` have their arguments in different orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

RUNNING, AFFINE = ("running_mean", "running_var"), ("weight", "bias")
_REST = ("momentum", "eps", "cudnn_enabled")
NORMS: Mapping[Callable[..., Any], tuple[str, ...]] = {
    F.batch_norm: ("input", *RUNNING, *AFFINE, "training", *_REST),
    F.instance_norm: ("input", *RUNNING, *AFFINE, "use_input_stats", *_REST),
    torch.batch_norm: ("input", *AFFINE, *RUNNING, "training", *_REST),
    torch.instance_norm: ("input", *AFFINE, *RUNNING, "use_input_stats", *_REST),
}
"""The names of each norm's arguments, in order."""


def named(norm: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a norm, by name."""
    return {**dict(zip(NORMS[norm], args, strict=False)), **kwargs}
