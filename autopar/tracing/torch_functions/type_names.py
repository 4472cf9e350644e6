"""`Tensor.type`, the old way to a dtype: asked, it gives the name of a tensor class; given one, it casts to its dtype.

The class has a device in it too: data-free tensors tell the one that they claim, and stay where they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


def type_of(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of `Tensor.type`; what it is given is a dtype, a tensor class or the name of one."""
    given = args[1] if len(args) > 1 else kwargs.get("dtype")
    if given is None:
        name, kind = torch.empty(0, dtype=args[0].dtype).type(), recorder.device.type
        return name if kind == "cpu" else name.replace("torch.", f"torch.{kind}.", 1)
    if isinstance(given, str):
        given = torch.empty(0).type(f"torch.{given.rpartition('.')[2]}").dtype
    return recorder.record(Tensor.to, args[0], getattr(given, "dtype", given))
