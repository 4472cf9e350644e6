"""Tracing: a model and examples of its inputs become an annotated `torch.fx.Graph`.

One recorder does it (`recorder`): data-free tensors flow through the user's own Python and every torch
function they meet is written down.
"""

from autopar.tracing.errors import ArgumentError, TraceError, UnknownDataError
from autopar.tracing.known import known
from autopar.tracing.traced import Traced
from autopar.tracing.tracer import trace

__all__ = ["ArgumentError", "TraceError", "Traced", "UnknownDataError", "known", "trace"]
