"""`Accelerator(mixed_precision=...)` around planned models: precision is part of the plan, so the two must agree.

accelerate wraps a model's forward in autocast, and converts its outputs to float32. It does not wrap a planned model,
whose calls run in the plan's dtypes; autocast would change these unnoticed. The outputs are converted to float32 here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from autopar.errors import InputError
from autopar.runtime.lowering.conversions import dtype_named
from autopar.runtime.stored.carried import plan_of, planned_of
from autopar.runtime.stored.model_class import ATTRIBUTE

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(model: nn.Module, name: str, option: str) -> None:
    """Raise InputError if the loop's precision `name` is not the plan's, since it would have no effect; `option` names
    the loop's option in the message."""
    planned = dtype_named(plan_of(model).precision.get("compute"))
    used = {planned} if planned is not None else {p.dtype for p in model.parameters() if p.is_floating_point()}
    if name not in _DTYPES:
        raise InputError(f"{option}, which no plan has: leave it out, or write one of {', '.join(_DTYPES)}")
    if used != {_DTYPES[name]}:
        raise InputError(f"{option}, and precision is part of the plan: give autoparallelize precision={name!r}")


@functools.cache
def let_accelerate_keep_precision() -> None:
    """Patch accelerate, once per process, to refuse planned models whose precision differs from its own."""
    owner: Any = Accelerator
    owner.prepare_model = _preparing(owner.prepare_model)


def _preparing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def prepare_model(accelerator: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if hasattr(model, ATTRIBUTE) and accelerator.native_amp:
            name = accelerator.mixed_precision
            check_precision(model, name, f"the Accelerator has mixed_precision={name!r}")
            planned_of(model).returns_float32 = True
        return plain(accelerator, model, *args, **kwargs)

    return prepare_model
