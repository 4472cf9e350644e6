"""`Tensor.type`, the legacy handling of dtypes: it returns the name of a tensor class, or casts to one.

The class includes a device: data-free tensors report the device that they claim, and never move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


def type_of(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of `Tensor.type`, which is given a dtype, a tensor class or the name of one."""
    kind_asked = args[1] if len(args) > 1 else kwargs.get("dtype")
    if kind_asked is None:
        name, kind = torch.empty(0, dtype=args[0].dtype).type(), recorder.device.type
        return name if kind == "cpu" else name.replace("torch.", f"torch.{kind}.", 1)
    if isinstance(kind_asked, str):
        kind_asked = torch.empty(0).type(f"torch.{kind_asked.rpartition('.')[2]}").dtype
    return recorder.record(Tensor.to, args[0], getattr(kind_asked, "dtype", kind_asked))
