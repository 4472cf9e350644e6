"""`trace`: a model and examples of its inputs become an annotated graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.graph import VAL
from autopar.tracing import huggingface
from autopar.tracing.attributes import Attributes
from autopar.tracing.cleaning import remove_dead_nodes
from autopar.tracing.custom_functions import custom_functions
from autopar.tracing.errors import UnknownDataError
from autopar.tracing.functionalize import functionalize
from autopar.tracing.guards import take_guards
from autopar.tracing.inputs import Inputs, gather
from autopar.tracing.libraries import DataFreePaths
from autopar.tracing.recorder import Recorder
from autopar.tracing.regions import checkpoint_regions
from autopar.tracing.scopes import module_calls
from autopar.tracing.sizes import Traced as TracedNumbers
from autopar.tracing.traced import Traced


def trace(
    model: nn.Module,
    meta_args: Mapping[str, Any],
    concrete_args: Mapping[str, Any] | None = None,
    *,
    bias_addition_split: bool = True,
    remove_inplace: bool = True,
    parameter_dtype: torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    trace_sizes: bool = True,
    device: torch.device | str | None = None,
) -> Traced:
    """Trace `model` on examples.

    `meta_args`: examples by argument name, which stay inputs; real or meta tensors, nested as the model takes
    them; wrap one in `known` and the trace may read its contents. `concrete_args`: values that are fixed.
    What has a default and is in neither is fixed to its default. `loss_fn(output, **extra)` is traced in; its
    further arguments are inputs too and the graph's output is the loss. `parameter_dtype`: floating
    parameters and inputs appear in this dtype. `device`: what data-free tensors claim as theirs (default: that
    of the parameters, else of the examples, else cpu).

    Raises InputError for names and values that do not fit the signature, TraceError with the place in the
    model for what cannot be traced.
    """
    inputs = gather(model, meta_args, concrete_args or {}, loss_fn)
    paths = DataFreePaths()
    while True:
        try:
            return _trace_once(
                model, inputs, loss_fn, paths,
                split=bias_addition_split, functional=remove_inplace, dtype=parameter_dtype, sizes=trace_sizes,
                device=_device(model, inputs, device),
            )  # fmt: skip
        except UnknownDataError as error:
            if not paths.offer(error.frames):
                raise


def _trace_once(
    model: nn.Module,
    inputs: Inputs,
    loss_fn: Callable[..., Any] | None,
    paths: DataFreePaths,
    *,
    split: bool,
    functional: bool,
    dtype: torch.dtype | None,
    sizes: bool,
    device: torch.device,
) -> Traced:
    graph = fx.Graph()
    attributes = Attributes(model, dtype)
    recorder = Recorder(graph, attributes, device=device, bias_addition_split=split, trace_sizes=sizes)
    placeholders = _placeholders(recorder, inputs, dtype)
    modules = {m: name for name, m in model.named_modules()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(huggingface.prepared())
        stack.enter_context(attributes.swapped())
        stack.enter_context(checkpoint_regions(recorder))
        stack.enter_context(custom_functions(recorder))
        stack.enter_context(paths.offered())
        stack.enter_context(module_calls(recorder, modules, lambda module, path: False))
        stack.enter_context(recorder)
        result = _call(model, inputs, loss_fn, placeholders)
        leaves, out_spec = pytree.tree_flatten(result)
        flat = tuple(_output(recorder, leaf) for leaf in leaves)
    output = graph.output(flat)
    recorder.annotate(output)
    output.meta[VAL] = fx.node.map_aggregate(flat, lambda v: v.meta[VAL] if isinstance(v, fx.Node) else v)
    if functional:
        functionalize(graph)
    guards = take_guards(graph)
    remove_dead_nodes(graph)
    return Traced(graph, model, inputs, out_spec, attributes.constants, guards)


def _placeholders(recorder: Recorder, inputs: Inputs, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """A data-free tensor and a placeholder for every tensor input."""
    made: dict[str, torch.Tensor] = {}
    for leaf in inputs.leaves:
        example = leaf.example
        cast = dtype if example.is_floating_point() else None
        free = torch.empty_strided(example.shape, example.stride(), dtype=cast or example.dtype, device="meta")
        free.requires_grad_(example.requires_grad)
        node = recorder.graph.placeholder(leaf.name)
        recorder.register(node, free)
        node.meta["example_value"] = example
        if leaf.known:
            recorder.known.put(free, example.detach().cpu(), node, from_input=True)
        made[leaf.name] = free
    return made


def _call(model: nn.Module, inputs: Inputs, loss_fn: Callable[..., Any] | None, tensors: dict[str, torch.Tensor]) -> Any:
    values = inputs.values(tensors)
    kinds = {n: p.kind for n, p in inputs.signature.parameters.items()}
    positional = [values.pop(n) for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_ONLY and n in values]
    for name, kind in kinds.items():
        if kind is inspect.Parameter.VAR_POSITIONAL and name in values:
            before = [n for n, k in kinds.items() if k is inspect.Parameter.POSITIONAL_OR_KEYWORD and n in values]
            positional += [values.pop(n) for n in before] + list(values.pop(name))
    own = {n: v for n, v in values.items() if n in inputs.model_names}
    result = model(*positional, **own)
    if loss_fn is None:
        return result
    return loss_fn(result, **{n: values[n] for n in inputs.loss_names if n in values})


def _output(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return recorder.node_of(value)
    if isinstance(value, TracedNumbers):
        return recorder.sizes.node(value)
    return value


def _device(model: nn.Module, inputs: Inputs, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers(), *(leaf.example for leaf in inputs.leaves)):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")

