"""Tracing: a model and examples of its inputs become an annotated `torch.fx.Graph`.

The recorder (`recorder`) does it: data-free tensors flow through the user's own Python, and every torch function that
is called on them is recorded as a node. The other names here are thin interfaces to it.
"""

from autopar.python.replaced import override
from autopar.tracing import passes
from autopar.tracing.contents.known import known
from autopar.tracing.contents.unknown import as_tensor
from autopar.tracing.errors import ArgumentError, TraceError, UnknownDataError
from autopar.tracing.fronts import (
    HFTracer,
    MetaTracer,
    TracingConfig,
    flat_names,
    hf_symbolic_trace,
    is_symbolic,
    unflatten,
)
from autopar.tracing.huggingface import disable_hooked_forward
from autopar.tracing.leaves.which import leaf_rule
from autopar.tracing.order import ExecutionOrder, record_execution
from autopar.tracing.robust import GraphCollection, RobustTracer, recursive_trace
from autopar.tracing.scopes import Scope, ScopeContextManager
from autopar.tracing.symbolic import symbolic_trace
from autopar.tracing.traced import Traced
from autopar.tracing.tracer import trace

__all__ = [
    "ArgumentError",
    "ExecutionOrder",
    "GraphCollection",
    "HFTracer",
    "MetaTracer",
    "RobustTracer",
    "Scope",
    "ScopeContextManager",
    "TraceError",
    "Traced",
    "TracingConfig",
    "UnknownDataError",
    "as_tensor",
    "disable_hooked_forward",
    "flat_names",
    "hf_symbolic_trace",
    "is_symbolic",
    "known",
    "leaf_rule",
    "override",
    "passes",
    "record_execution",
    "recursive_trace",
    "symbolic_trace",
    "trace",
    "unflatten",
]
