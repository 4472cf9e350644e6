"""The fused inference paths of `torch.nn` (as of `nn.TransformerEncoder`) are off: their ops are traced."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from autopar.tracing.patching import attributes_set


def fused_layers_off() -> AbstractContextManager[None]:
    """While inside, these layers run as in training: the fused ops look at data to skip padding, and cannot be sharded.

    Only results at padded positions differ: fused, they are 0.
    """
    return attributes_set(torch.backends.mha, _is_fastpath_enabled=False)
