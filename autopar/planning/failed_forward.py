"""Errors that a model's own forward raises while it is traced, with the place and a hint added."""

from __future__ import annotations

import sys
import traceback

import torch
from torch import nn

from autopar.errors import UntraceableError
from autopar.tracing.calls.containers import WITHOUT_CACHES
from autopar.tracing.places import raised_at


def as_untraceable(error: Exception, model: nn.Module, compute: torch.dtype | None) -> UntraceableError:
    """The error that names module and line. `compute`: the dtype that the model was traced in, None for its own."""
    return UntraceableError(
        f"the model's forward raised {type(error).__name__} on data-free copies of the examples: {error}"
        + _about_dtypes(str(error), compute)
        + _about_caches(error, model),
        where=", ".join(filter(None, [_innermost(error, model), raised_at(error, _homes(model))])),
    )


def _innermost(error: Exception, model: nn.Module) -> str:
    """The innermost running module: torch's own layers, as in an nn.Sequential, have no line of user code to name."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next((candidate for candidate in reversed(running) if isinstance(candidate, nn.Module)), None)
    if module is None:
        return ""
    named = model.named_modules(remove_duplicate=False)  # a shared module has several paths
    paths = [path for path, candidate in named if candidate is module]
    if "" in paths:
        return "the root module"
    return f"{' or '.join(paths[:3])} ({type(module).__name__})" if paths else type(module).__name__


def _about_dtypes(message: str, compute: torch.dtype | None) -> str:
    advice = (
        f"; all but buffers is {compute} there: cast what these give (y.to(x.dtype)), or plan with precision='fp32'"
    )
    return advice if compute is not None and "dtype" in message else ""


def _about_caches(error: Exception, model: nn.Module) -> str:
    """Advice to turn caches off, which training does not need, where the library's cache code raised the error."""
    is_on = getattr(getattr(model, "config", None), "use_cache", False)
    frames = traceback.extract_tb(error.__traceback__)
    if not is_on or not any("cache_utils" in frame.filename for frame in frames):
        return ""
    return f"; {WITHOUT_CACHES}"


def _homes(model: nn.Module) -> set[str]:
    """The files in which the model's modules are defined."""
    files = (getattr(sys.modules.get(type(m).__module__), "__file__", None) for m in model.modules())
    return {file for file in files if file is not None}
