"""Functions compiled by `torch.jit.script`: the Python function that each was made from runs in its place.

TorchScript's interpreter calls operators without passing modes, and ops inside their data-free kernels (such as an
empty tensor for the result) would be recorded as if they were the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar.tracing.errors import OR_LEAF
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

_SOURCE = "_torchdynamo_inline"  # attribute in which torch.jit keeps the source function for torch.compile


@contextlib.contextmanager
def scripted_functions(recorder: Recorder) -> Iterator[None]:
    """While inside, scripted functions run as Python; UnknownDataError for one without source."""
    interpreted = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_recording():
            return interpreted(function, *args, **kwargs)
        source = getattr(function, _SOURCE, None)
        if source is None:
            raise recorder.unknown(
                f"{function.name}() of TorchScript has no Python source",
                mend=f"call the function it was made of{OR_LEAF}",
            )
        return source(*args, **kwargs)

    with attributes_set(torch.jit.ScriptFunction, __call__=call):
        yield
