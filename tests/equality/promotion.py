"""The model's own casts to float32, promoted to float64: exact comparisons need it (see `Promotion`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
        return func(*map(_promoted, args), **{name: _promoted(value) for name, value in (kwargs or {}).items()})


def _promoted(value: Any) -> Any:
    """Written out, for every call passes here: a map of `torch.utils._pytree` took half the time of the runs."""
    if value is torch.float32:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(map(_promoted, value))
    if type(value) is dict:
        return {key: _promoted(inner) for key, inner in value.items()}
    return value
