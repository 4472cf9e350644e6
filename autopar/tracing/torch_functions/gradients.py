"""Calls in forward that compute gradients or influence them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import UntraceableError
from autopar.gradient_starts import start_of_gradients
from autopar.graph import AUTOCAST, GRAD_MODE, PLACE, REGION, SCOPE, VAL
from autopar.tracing.errors import TraceError
from autopar.tracing.values import value_of

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder


def differentiates(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Record gradients with respect to inputs and intermediate tensors, which may be differentiated again.

    Gradients with respect to parameters are refused, since the graph reads gathered copies of these; they are correct
    in a leaf, which runs the code as it is. So is `backward`, since it adds to `.grad` and returns no result.
    """
    if func is not torch.autograd.grad:
        raise UntraceableError(
            f"{func.__name__}() inside forward adds to .grad, which a planned forward leaves to the loop: ask for the "
            "gradients, with torch.autograd.grad(energy, x, create_graph=True)",
            where=recorder.where(),
        )
    arguments = inspect.signature(func).bind(*args, **kwargs).arguments
    by = pytree.tree_leaves(arguments["inputs"])
    if any(recorder.node_of(tensor).op == "get_attr" for tensor in by):
        raise TraceError(
            "grad() inside forward asks for gradients with respect to a parameter, a buffer or a constant: let the "
            "module around it be a leaf, whose gradients every rank computes whole",
            where=recorder.where(),
        )
    if arguments.get("is_grads_batched"):
        raise TraceError("grad(is_grads_batched=True) inside forward: call it for each row", where=recorder.where())
    for tensor in by:
        _begin_at(recorder, tensor)
    return recorder.record_call(func, partial(_gradients, recorder, arguments), args, kwargs)


def _begin_at(recorder: Recorder, tensor: torch.Tensor) -> None:
    """Insert `start_of_gradients` behind a tensor, for all its readers from when it required a gradient."""
    node = recorder.node_of(tensor)
    if node.target is start_of_gradients:
        return
    with recorder.graph.inserting_after(node):
        start = recorder.graph.call_function(start_of_gradients, (node,))
    before = recorder.read_before_gradient.get(id(tensor), frozenset())
    node.replace_all_uses_with(start, delete_user_cb=lambda user: user is not start and user not in before)
    start.meta.update({key: node.meta[key] for key in (SCOPE, REGION, PLACE, GRAD_MODE, AUTOCAST)})
    start.meta[VAL] = value_of(tensor)
    recorder.nodes[id(tensor)] = start


def _gradients(
    recorder: Recorder, call_arguments: Mapping[str, Any], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """The data-free results of such a call; as tensors have no history, the graph tells which inputs matter.

    Raises RuntimeError, as torch does, for an input that leads to no output.
    """
    ends = [
        recorder.node_of(tensor) for tensor in pytree.tree_leaves(call_arguments["outputs"]) if tensor.requires_grad
    ]
    leading = _ancestors(ends)
    results: list[torch.Tensor | None] = []
    for tensor in pytree.tree_leaves(call_arguments["inputs"]):
        is_used = recorder.node_of(tensor) in leading
        if not (is_used or call_arguments.get("allow_unused") or call_arguments.get("materialize_grads")):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior."
            )
        gradient = torch.empty_like(tensor, requires_grad=bool(is_used and call_arguments.get("create_graph")))
        is_made = is_used or call_arguments.get("materialize_grads")
        results.append(gradient.clone() if is_made else None)  # a clone is no autograd leaf
    return tuple(results)


def _ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that `ends` are computed from, and these themselves, along tensors that require gradients."""
    waiting = list(ends)
    ancestors = set(waiting)
    while waiting:
        node = waiting.pop()
        sources = [source for source in node.all_input_nodes if source not in ancestors and _has_gradient(source)]
        ancestors.update(sources)
        waiting += sources
    return ancestors


def _has_gradient(node: fx.Node) -> bool:
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves(node.meta.get(VAL)))


def begins(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`requires_grad_()`: nodes that have read the tensor before do not propagate its gradient."""
    tensor = args[0]
    node = recorder.nodes.get(id(tensor))
    if node is not None and not tensor.requires_grad:
        recorder.read_before_gradient[id(tensor)] = frozenset(node.users)
    return func(*args, **kwargs)


def hooked(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a hook: on a data-free tensor it would never run, and in a leaf it might get only one rank's rows."""
    raise UntraceableError(
        "register_hook() in forward changes or reads a gradient, which calls of the graph would not do: write it as "
        "the backward of a torch.autograd.Function",
        where=recorder.where(),
    )


def dual(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Refuse a dual tensor: its forward-mode level has ended when the graph runs."""
    raise UntraceableError(
        "make_dual() inside forward differentiates in forward mode: write it as torch.func.jvp(f, (x,), (direction,)), "
        "which is planned",
        where=recorder.where(),
    )
