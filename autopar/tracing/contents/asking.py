"""Questions about a tensor's contents: answered where these are known or the answer can be assumed, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from autopar.graph import OF_DATA, VAL
from autopar.tracing.arguments import Arguments
from autopar.tracing.calls.guards import ANSWER
from autopar.tracing.contents.asserting import asserted
from autopar.tracing.contents.deciding import known_or_leaf
from autopar.tracing.contents.unknown import UnknownBool, UnknownNumber
from autopar.tracing.errors import OR_LEAF
from autopar.tracing.targets import written_as

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder

Tensor = torch.Tensor
_READ = (Tensor.__float__, Tensor.__int__)  # Python requires these to return a plain number


def ask(recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer that an eager run would give; UnknownDataError where it depends on the inputs."""
    arguments = Arguments(recorder, args, kwargs)
    known_values = recorder.known
    if not known_values.can_tell(arguments.tensors):
        healthy = recorder.finite.answer(func, args, recorder.where())
        if healthy is not None:
            return healthy
        if func is Tensor.item:
            return _unknown_item(recorder, args[0], arguments.graph_args)
        assumed = asserted() if func is Tensor.__bool__ else None
        if assumed is not None:
            return assumed  # an assertion is assumed to hold, like `torch._check`
        name = getattr(func, "__name__", repr(func)).strip("_")
        if any(id(t) in known_values.random for t in arguments.tensors):
            raise recorder.unknown(
                f"{name}() asks for a random number (LayerDrop does), and the graph would hold one draw for ever",
                mend=f"set the probability to 0, call eval(){OR_LEAF}",
            )
        question = f"{name}() asks for the contents of a tensor that depends on the inputs"
        otherwise = known_or_leaf(recorder.nodes.get(id(tensor)) for tensor in arguments.tensors)
        mend = f"write .item(), which a graph can compute with, or {otherwise}" if func in _READ else otherwise
        raise recorder.unknown(question, mend)
    answer, is_guard = known_values.answer(func, args, kwargs, arguments.tensors)
    if is_guard:
        call = written_as(func, args, kwargs)
        node = recorder.graph.create_node(call.op, call.target, arguments.graph_args, arguments.graph_kwargs)
        recorder.annotate(node, place=True)
        node.meta[VAL] = node.meta[ANSWER] = answer
    return answer


def guard_shapes(recorder: Recorder, result: Any) -> Any:
    """Guard the shapes of tensors whose sizes depend on known inputs (`ids.unique()`), as `ask` guards contents.

    Returns the tensors.
    """
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, Tensor):
            node = recorder.graph.call_method("size", (recorder.node_of(tensor),))
            recorder.annotate(node, place=True)
            node.meta[VAL] = node.meta[ANSWER] = tuple(tensor.shape)
    return result


def _unknown_item(recorder: Recorder, tensor: Tensor, graph_args: Any) -> UnknownNumber:
    """The unknown number that `tensor.item()` returns, and its node."""
    if tensor.is_complex():
        raise recorder.unknown("item() reads a complex number", deciding=[tensor])
    kind = float if tensor.is_floating_point() else bool if tensor.dtype == torch.bool else int
    node = recorder.graph.call_method("item", graph_args)
    recorder.annotate(node, place=True)
    node.meta[VAL] = None
    node.meta[OF_DATA] = True
    number = (UnknownBool if kind is bool else UnknownNumber)(recorder, node, kind)
    with recorder.on():  # read at once: the tensor may be written into later
        number.read(tensor)
    number.whole = recorder.known.whole_part(tensor)
    return number
