"""The model's own casts to float32, promoted to float64: exact comparisons need it (see `Promotion`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


class Promotion(TorchFunctionMode):
    """Turns every request for float32 into one for float64.

    Hugging Face losses, norms and rotary embeddings go through float32 whatever the model's dtype, so
    that splitting a batch in two moves a float64 loss by 5e-7. Under this mode, in both runs, they do not.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map_only(torch.dtype, _promote, (args, kwargs or {}))
        return func(*args, **kwargs)


def _promote(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype
