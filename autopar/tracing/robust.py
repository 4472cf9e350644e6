"""Tracing that never fails: a module that cannot be traced becomes a leaf, and is then traced on its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.tracing.attempt import Options
from autopar.tracing.calls.inputs import gather
from autopar.tracing.huggingface import register_caches
from autopar.tracing.leaves.which import LeafPolicy
from autopar.tracing.libraries import DataFreePaths
from autopar.tracing.model_state.caches import forget
from autopar.tracing.symbolic import trace_without_examples
from autopar.tracing.tracer import trace_until_done


class RobustTracer:
    """Traces modules, keeps those that fail as leaves, and remembers which failed and why.

    The registry of leaf types belongs to the class, failures to the object.
    """

    _leaf_types: ClassVar[set[type[nn.Module]]] = set()

    def __init__(self) -> None:
        self._failures: dict[nn.Module, str] = {}
        self._visited: set[nn.Module] = set()

    @classmethod
    def register_leaf(cls, kind: type[nn.Module]) -> None:
        """Modules of exactly this type are leaves from now on."""
        RobustTracer._leaf_types.add(kind)

    @classmethod
    def unregister_leaf(cls, kind: type[nn.Module]) -> None:
        """Modules of this type are no leaves any more; KeyError if the type was not registered."""
        RobustTracer._leaf_types.remove(kind)

    @classmethod
    def is_registered_leaf(cls, module: nn.Module | type[nn.Module]) -> bool:
        return (module if isinstance(module, type) else type(module)) in RobustTracer._leaf_types

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return self._policy().is_leaf(module, path)

    def is_failed(self, module: nn.Module) -> bool:
        return module in self._failures

    def failure_msg(self, module: nn.Module) -> str | None:
        """Why a module could not be traced: "ExceptionType: message"."""
        return self._failures.get(module)

    def is_unvisited(self, module: nn.Module) -> bool:
        """Whether a module was neither traced itself nor called while another one was traced."""
        return module not in self._visited

    def record_call_module(self, module: nn.Module, error: BaseException | None = None) -> None:
        """Note that a module was called, and the error that it raised, if any."""
        self._visited.add(module)
        if error is not None:
            self._failures[module] = f"{type(error).__name__}: {error}"

    def trace(self, root: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> fx.Graph:
        """The graph of `root`: tensors in `concrete_args` are examples of inputs, other values are fixed.

        A root that cannot be traced at all is marked as failed and gets an empty graph; no error is raised.
        """
        values = dict(concrete_args or {})
        self._visited.add(root)
        try:
            if self.is_leaf_module(root, ""):
                return _single_call(root)
            return self._trace(root, values)
        except Exception as error:  # no error may escape; it is kept as the failure's message
            self.record_call_module(root, error)
            return fx.Graph()

    def _trace(self, root: nn.Module, values: dict[str, Any]) -> fx.Graph:
        examples = {n: v for n, v in values.items() if _holds_tensor(v)}
        fixed = {n: v for n, v in values.items() if n not in examples}
        defaults = inspect.signature(root.forward).parameters.values()
        if not examples and not any(isinstance(p.default, torch.Tensor) for p in defaults):
            return trace_without_examples(root, fixed, self._policy()).graph
        register_caches()
        options = Options(
            self._policy(), DataFreePaths(), torch.device("cpu"), bias_addition_split=False, remove_inplace=False
        )
        try:
            traced = trace_until_done(root, gather(root, examples, fixed, None), options, contained=(Exception,))
        finally:
            self._failures.update(options.policy.failed)
            self._visited.update(options.policy.failed)
            forget(options.remaining, root)
        assert traced.order is not None
        self._visited.update(traced.order.modules)
        return traced.graph

    def _policy(self) -> LeafPolicy:
        return LeafPolicy("layers", exact_types=frozenset(RobustTracer._leaf_types), failed=dict(self._failures))


class GraphCollection:
    """Graphs of a model and, where modules in it failed, of the children of these modules."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._tracer = RobustTracer()
        self._graphs: dict[nn.Module, fx.Graph] = {}

    def recursive_trace(self, model: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> None:
        """The graphs of a model, and of the modules that had to be traced on their own."""
        self._clear()
        self._graphs[model] = self._tracer.trace(model, concrete_args)
        visited: set[nn.Module] = set()
        while failed := [m for m in self._tracer._failures if m not in visited]:
            for module in failed:
                visited.add(module)
                for child in module.children():
                    if child not in self._graphs:
                        self._graphs[child] = self._tracer.trace(child)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def __getitem__(self, module: nn.Module) -> fx.Graph:
        return self._graphs[module]

    def is_failed(self, module: nn.Module) -> bool:
        return self._tracer.is_failed(module)

    def failure_msg(self, module: nn.Module) -> str | None:
        return self._tracer.failure_msg(module)

    def is_unvisited(self, module: nn.Module) -> bool:
        return self._tracer.is_unvisited(module)


def recursive_trace(model: nn.Module, concrete_args: Mapping[str, Any] | None = None) -> GraphCollection:
    """The graphs of a model and of the parts that had to be traced on their own."""
    collection = GraphCollection()
    collection.recursive_trace(model, concrete_args)
    return collection


def _single_call(root: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    parameters = inspect.signature(root.forward).parameters.values()
    inputs = tuple(graph.placeholder(p.name) for p in parameters if p.default is p.empty)
    graph.output(graph.call_module("root", inputs))
    return graph


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value))
