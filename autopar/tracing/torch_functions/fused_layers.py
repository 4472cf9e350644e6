"""The fused layers of `torch.nn` for inference (`nn.TransformerEncoder` and its like) are traced as their ops."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from autopar.tracing.patching import attributes_set


def fused_layers_off() -> AbstractContextManager[None]:
    """Inside, they run as in training: fused, they look at data to leave padding out, and are ops that nothing splits.

    What differs is the result where there is padding: fused, it is 0.
    """
    return attributes_set(torch.backends.mha, _is_fastpath_enabled=False)
