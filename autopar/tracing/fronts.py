"""The interfaces of older tracers, each a few lines on top of the recorder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.tracing.calls.inputs import leaf_names
from autopar.tracing.errors import ArgumentError
from autopar.tracing.symbolic import trace_without_examples
from autopar.tracing.traced import Traced
from autopar.tracing.tracer import FunctionModule, trace


class MetaTracer:
    """A tracer object. `root` is the module that it traced last; a function is wrapped in a module."""

    root: nn.Module | None = None

    def trace(
        self, root: nn.Module | Callable[..., Any], meta_args: Mapping[str, Any] | None = None, **options: Any
    ) -> Traced:
        """`trace(root, meta_args, **options)`; without examples, symbolically."""
        self.root = root if isinstance(root, nn.Module) else FunctionModule(root)
        if meta_args is None:
            return trace_without_examples(self.root, options.get("concrete_args"))
        return trace(self.root, meta_args, **options)


class HFTracer(MetaTracer):
    """The tracer of `hf_symbolic_trace`: layers, activations and Conv1D are leaves; the rest is recorded as called."""

    def trace(
        self, root: nn.Module | Callable[..., Any], meta_args: Mapping[str, Any] | None = None, **options: Any
    ) -> Traced:
        defaults = {"leaf_policy": "layers", "bias_addition_split": False, "remove_inplace": False}
        return super().trace(root, meta_args, **{**defaults, **options})


def hf_symbolic_trace(
    model: nn.Module,
    input_names: Sequence[str] | None = None,
    concrete_args: Mapping[str, Any] | None = None,
    tracer_cls: type[MetaTracer] = HFTracer,
    dummy_inputs: Mapping[str, Any] | None = None,
) -> tuple[fx.GraphModule, MetaTracer]:
    """The graph of a transformers model as a module, and the tracer.

    `input_names` (default: the names of the dummies) remain inputs; every other argument is fixed to its value in
    `concrete_args`, else its default, else None. Dummies come from `dummy_inputs`, else from the model.

    Raises ArgumentError (a ValueError) for a name that `forward` does not have.
    """
    dummies = dict(dummy_inputs if dummy_inputs is not None else getattr(model, "dummy_inputs", None) or {})
    names = list(dummies) if input_names is None else list(input_names)
    parameters = inspect.signature(model.forward).parameters
    for name in names:
        if name not in parameters:
            raise ArgumentError(f"input_names has {name!r}, but forward takes {', '.join(parameters)}")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    fixed = {
        n: None for n, p in parameters.items() if n not in names and p.default is p.empty and p.kind not in variadic
    }
    fixed.update(concrete_args or {})
    tracer = tracer_cls()
    examples = {n: dummies[n] for n in names if n in dummies}
    if examples:
        missing = [n for n in names if n not in examples and parameters[n].default is inspect.Parameter.empty]
        if missing:
            raise ArgumentError(f"there is no dummy for {', '.join(missing)}: give one in dummy_inputs")
        return tracer.trace(model, examples, concrete_args=fixed).gm, tracer
    return tracer.trace(model, None, concrete_args=fixed).gm, tracer


@dataclass
class TracingConfig:
    """How to record a model's execution order: with which tracer, and with which arguments fixed."""

    tracer: fx.Tracer = field(default_factory=fx.Tracer)
    concrete_args: dict[str, Any] | None = None


def flat_names(values: Mapping[str, Any] | Sequence[Any]) -> list[str]:
    """Names of the flattened inputs: the key, `key_0`, `key_1`... for a container; `a0`, `a1`... for unnamed ones.

    >>> flat_names({"x": torch.ones(1), "it": [torch.ones(1)] * 2}), flat_names([torch.ones(1)] * 2)
    (['x', 'it_0', 'it_1'], ['a0', 'a1'])
    """
    named = values if isinstance(values, Mapping) else {f"a{i}": v for i, v in enumerate(values)}
    return [name for key, value in named.items() for name in leaf_names(key, value)]


def unflatten(spec: pytree.TreeSpec, flat: Sequence[Any]) -> Any:
    """The nested structure that `spec` describes, with these leaves."""
    return pytree.tree_unflatten(list(flat), spec)


def is_symbolic(value: Any) -> bool:
    """Whether a number is not known while tracing: a dynamic size, or read from unknown data."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
