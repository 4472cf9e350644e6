"""`Tensor.new`, the legacy way to create a tensor like another one, from sizes or from data.

It distinguishes a `torch.Size` from a list, which a graph cannot. So it is recorded as `new_empty` or `new_tensor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor


def new(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of `Tensor.new`; calls with other arguments (a storage) are recorded as they are."""
    like, *positional = args
    device = {name: value for name, value in kwargs.items() if name == "device"}
    size = kwargs.get(
        "size", positional[0] if len(positional) == 1 and isinstance(positional[0], torch.Size) else tuple(positional)
    )
    if kwargs.keys() - {"device", "size"}:
        return recorder.record(func, *args, **kwargs)
    if isinstance(size, torch.Size) or all(isinstance(length, int) for length in size):
        return recorder.record(Tensor.new_empty, like, tuple(size) or (0,), **device)
    if len(positional) == 1 and isinstance(positional[0], (list, tuple)):
        return recorder.record(Tensor.new_tensor, like, positional[0], **device)
    return recorder.record(func, *args, **kwargs)
