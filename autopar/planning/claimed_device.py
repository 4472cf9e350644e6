"""The device that data-free tensors claim to be on while a model is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def claimed_device(model: nn.Module, meta_args: Mapping[str, Any], kind: str) -> torch.device:
    """The first device of the model or its examples that is neither meta nor CPU, else the cluster's `kind`.

    Code that branches on the device is then traced as it will run.
    """
    examples = list(meta_args.values()) if isinstance(meta_args, Mapping) else []  # `trace` reports other types
    tensors = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(examples))
    devices = (t.device for t in tensors if isinstance(t, torch.Tensor))
    return next((device for device in devices if device.type not in ("meta", "cpu")), torch.device(kind))
