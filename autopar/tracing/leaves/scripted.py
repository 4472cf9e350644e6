"""Functions that `torch.jit` compiles: the Python function that each was made of runs in its place.

The interpreter of TorchScript calls operators past every mode, and what their data-free kernels do inside (an empty
tensor for the result) would stand in the graph as if it were the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar.tracing.errors import OR_LEAF
from autopar.tracing.patching import attributes_set
from autopar.tracing.recorder import Recorder

_SOURCE = "_torchdynamo_inline"  # where torch.jit keeps it, for torch.compile


@contextlib.contextmanager
def scripted_functions(recorder: Recorder) -> Iterator[None]:
    """While inside, a scripted function that is called runs as Python; UnknownDataError for one that has no source."""
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
