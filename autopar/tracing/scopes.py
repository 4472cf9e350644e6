"""Module calls as the recorder sees them: which module is running, and which are leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.tracing.recorder import Recorder

LeafRule = Callable[[nn.Module, str], bool]


@contextlib.contextmanager
def module_calls(recorder: Recorder, paths: dict[nn.Module, str], is_leaf: LeafRule) -> Iterator[None]:
    """While inside, a call of any module keeps `recorder.scope`; a call of a leaf becomes one node."""
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(module)
        if path is None:  # not in the model's tree: made on the fly, or the loss
            path = f"{recorder.scope[-1][0]}.<{type(module).__name__}>" if recorder.scope else f"<{type(module).__name__}>"
        elif path == "":
            return original(module, *args, **kwargs)
        outer = recorder.scope
        recorder.scope = (*outer, (path, type(module).__name__))
        try:
            if is_leaf(module, path):
                return recorder.record_module(module, path, original, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            recorder.scope = outer

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
