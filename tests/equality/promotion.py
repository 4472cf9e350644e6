"""Promotes the model's own casts to float32 to float64, which exact comparisons need (see `Promotion`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Promotion(TorchFunctionMode):
    """Turns every request for float32 into one for float64.

    Losses, norms and rotary embeddings of Hugging Face cast to float32 whatever the model's dtype, so that splitting a
    batch in two would change a float64 loss by 5e-7. With this mode, active in both runs, there are no such casts.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_promoted, args), **{name: _promoted(value) for name, value in (kwargs or {}).items()})


def _promoted(value: Any) -> Any:
    """Written without `torch.utils._pytree`, whose map took half of the run time, as every call comes here."""
    if value is torch.float32:
        return torch.float64
    if type(value) in (tuple, list):
        return type(value)(map(_promoted, value))
    if type(value) is dict:
        return {key: _promoted(inner) for key, inner in value.items()}
    return value
