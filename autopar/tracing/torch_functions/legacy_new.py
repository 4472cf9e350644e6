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
    like, *given = args
    device = {name: value for name, value in kwargs.items() if name == "device"}
    size = kwargs.get("size", given[0] if len(given) == 1 and isinstance(given[0], torch.Size) else tuple(given))
    if kwargs.keys() - {"device", "size"}:
        return recorder.record(func, *args, **kwargs)
    if isinstance(size, torch.Size) or all(isinstance(one, int) for one in size):
        return recorder.record(Tensor.new_empty, like, tuple(size) or (0,), **device)
    if len(given) == 1 and isinstance(given[0], (list, tuple)):
        return recorder.record(Tensor.new_tensor, like, given[0], **device)
    return recorder.record(func, *args, **kwargs)
