"""`torch.cond` and `scan`: one node each, whose bodies are graphs of their own.

A body is recorded on fresh tensors by its own recorder. Tensors that it reads from outside (parameters, captured
tensors) become further operands.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import VAL
from autopar.python.replaced import original, replaced
from autopar.tracing.arguments import Arguments
from autopar.tracing.recorder import Recorder
from autopar.tracing.rewriting import functional
from autopar.tracing.values import data_free_like

Tensor = torch.Tensor


class Body(Recorder):
    """Records a function called by a control-flow operator; `lifted`: nodes outside that it reads, in order."""

    def __init__(self, outer: Recorder) -> None:
        super().__init__(
            fx.Graph(),
            outer.attributes,
            device=outer.device,
            bias_addition_split=outer.split,
            trace_sizes=False,
            order=outer.order,
        )
        self.outer = outer
        self.scope, self.region = outer.scope, outer.region
        self.lifted: dict[fx.Node, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.result: Any = None

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; one from outside becomes a lifted input."""
        node = self.nodes.get(id(tensor))
        if node is not None:
            return node
        around = self.outer.node_of(tensor)
        if around not in self.lifted:
            first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
            place = self.graph.inserting_before(first) if first is not None else contextlib.nullcontext()
            with place:
                placeholder = self.graph.placeholder(around.name)
            self.annotate(placeholder)
            placeholder.meta[VAL] = around.meta[VAL]
            self.lifted[around] = placeholder
        return self.lifted[around]

    def run(self, function: Callable[..., Any], operands: Sequence[Any]) -> None:
        """Record `function(*operands)`; tensors among the operands become inputs."""

        def fresh(value: Tensor) -> Tensor:
            copy = data_free_like(value)
            placeholder = self.graph.placeholder(f"operand_{len(self.inputs)}")
            self.register(placeholder, copy)
            self.inputs.append(placeholder)
            return copy

        operands = pytree.tree_map_only(Tensor, fresh, list(operands))
        with self.outer.pausing(), self:
            self.result = function(*operands)
            flat = Arguments(self, self.result).graph_args
        self.graph.output(flat)

    def module(self, lifted: Sequence[fx.Node]) -> fx.GraphModule:
        """The body as a module, with these lifted nodes as its last inputs."""
        graph, copies = fx.Graph(), {}
        for node in self.inputs:
            copies[node] = graph.node_copy(node)
        for around in lifted:
            placeholder = graph.placeholder(around.name)
            placeholder.meta = dict(around.meta)
            if around in self.lifted:
                copies[self.lifted[around]] = placeholder
        for node in self.graph.nodes:
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        return fx.GraphModule({}, graph)


@contextlib.contextmanager
def bodies_recorded(recorder: Recorder) -> Iterator[None]:
    """While inside, `torch.cond` and `scan` are recorded, however they were imported."""
    from torch._higher_order_ops.scan import scan

    python_cond, python_scan = cast(FunctionType, torch.cond), cast(FunctionType, scan)
    plain_cond, plain_scan = original(python_cond), original(python_scan)

    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if not recorder.is_recording() and not _inside_body():
            return plain_cond(pred, true_fn, false_fn, operands)
        if isinstance(pred, (bool, int, float)):
            return (true_fn if pred else false_fn)(*operands)
        return record_cond(_current(recorder), pred, true_fn, false_fn, operands)

    def scanned(combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
        if not recorder.is_recording() and not _inside_body():
            return plain_scan(combine_fn, init, xs, dim=dim, reverse=reverse)
        return record_scan(_current(recorder), combine_fn, init, xs, dim, reverse)

    with replaced(python_cond, cond), replaced(python_scan, scanned):
        yield


def _stack() -> list[Any]:
    return [m for m in torch.overrides._get_current_function_mode_stack() if isinstance(m, Body)]


def _inside_body() -> bool:
    bodies = _stack()
    return bool(bodies) and bodies[-1].is_recording()


def _current(recorder: Recorder) -> Recorder:
    bodies = _stack()
    return bodies[-1] if bodies else recorder


def record_cond(recorder: Recorder, pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """Record a cond as one node; both bodies take the operands and what either of them reads from outside."""
    bodies = [Body(recorder), Body(recorder)]
    for body, function in zip(bodies, (true_fn, false_fn), strict=True):
        body.run(function, operands)
    lifted = list(dict.fromkeys(n for body in bodies for n in body.lifted))
    names = [_attach(recorder, "cond", f, b.module(lifted)) for f, b in zip((true_fn, false_fn), bodies, strict=True)]
    tensors = [v for v in pytree.tree_leaves(list(operands)) if isinstance(v, Tensor)]
    operand_nodes = Arguments(recorder, [pred, tensors]).graph_args
    node = recorder.graph.call_function(functional.cond, (operand_nodes[0], *names, (*operand_nodes[1], *lifted)))
    with recorder.pausing():
        result = pytree.tree_map_only(Tensor, data_free_like, bodies[0].result)
        recorder.register(node, result)
    return result


def record_scan(recorder: Recorder, combine_fn: Any, init: Any, xs: Any, dim: int, reverse: bool) -> Any:
    """Record a scan as one node of the body, carries, inputs, and what the body reads from outside."""
    carries, carry_spec = pytree.tree_flatten(init)
    inputs, input_spec = pytree.tree_flatten(xs)
    with recorder.pausing():
        slices = [v.select(dim, 0) for v in inputs]

    def flat(*operands: Any) -> Any:
        carry = pytree.tree_unflatten(list(operands[: len(carries)]), carry_spec)
        carry, out = combine_fn(carry, pytree.tree_unflatten(list(operands[len(carries) :]), input_spec))
        return (*pytree.tree_leaves(carry), *pytree.tree_leaves(out))

    body = Body(recorder)
    body.run(flat, [*carries, *slices])
    lifted = list(body.lifted)
    name = _attach(recorder, "scan", combine_fn, body.module(lifted))
    operand_nodes = Arguments(recorder, [carries, inputs]).graph_args
    node = recorder.graph.call_function(
        functional.scan, (name, *map(tuple, operand_nodes), tuple(lifted)), {"dim": dim, "reverse": reverse}
    )
    with recorder.pausing():
        slices_of_results = [data_free_like(v) for v in body.result]
        outs = [v.expand(inputs[0].shape[dim], *v.shape).clone() for v in slices_of_results[len(carries) :]]
        result = (*slices_of_results[: len(carries)], *outs)
        recorder.register(node, result)
    # carries and outputs have the structure that the body returned; a single one is not wrapped
    carry = pytree.tree_unflatten(list(result[: len(carries)]), carry_spec)
    return carry, outs[0] if len(outs) == 1 else tuple(outs)


def _attach(recorder: Recorder, kind: str, function: Any, body: fx.GraphModule) -> fx.Node:
    """A `get_attr` node with a new name for a body."""
    short = re.sub(r"\W", "", getattr(function, "__name__", type(function).__name__)) or "fn"
    constants = recorder.attributes.constants
    name = f"_cb_{kind}_{short}_{len(constants)}"
    constants[name] = body
    node = recorder.graph.get_attr(name)
    recorder.annotate(node, place=True)
    node.meta[VAL] = None
    return node
