"""`torch.vmap` inside a model: its body is recorded below the batching, where tensors have all their dims.

Above it the recorder would see tensors without their batch dim, which no graph could replay. So while a
vmapped function runs, a dispatch mode records what reaches the dispatcher.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch._functorch.apis  # where `torch.vmap` looks up what it calls
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder
from autopar.tracing.values import META


class _Below(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == META:  # the batching makes tensors where those it sees are
            kwargs = {**kwargs, "device": self.recorder.device}
        return self.recorder.record(func, *args, **kwargs)


@contextlib.contextmanager
def batched_bodies(recorder: Recorder) -> Iterator[None]:
    """While inside, `torch.vmap(f)(...)` in the user's code is recorded as the operations on batched tensors."""
    apis: Any = torch._functorch.apis
    original = apis.vmap_impl

    def impl(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_recording() or recorder.is_below:  # one mode is enough: it sees what nested vmaps come to
            return original(*args, **kwargs)
        with recorder.below_functions(), _Below(recorder):
            return original(*args, **kwargs)

    with attributes_set(apis, vmap_impl=impl):
        yield
