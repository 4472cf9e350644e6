"""Calls in forward that ask for gradients, or for a say in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.errors import InputError, UntraceableError
from autopar.graph import PLACE
from autopar.tracing.errors import TraceError

if TYPE_CHECKING:
    from autopar.tracing.recorder import Recorder


def differentiates(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of gradients would miss what other ranks have. It is no TraceError: as a leaf it would be no better.

    Gradients by an input are in the graph. What forward makes needs none in a replay, and parameters are read through
    copies that are gathered: these are gradients by nothing there, and right in a leaf, which runs the code as it is.
    """
    if func is torch.autograd.grad and not kwargs.get("create_graph"):
        by = pytree.tree_leaves(args[1] if len(args) > 1 else kwargs["inputs"])
        if all(recorder.node_of(tensor).op == "placeholder" for tensor in by):
            return recorder.record(func, *args, **kwargs)
        raise TraceError(
            "grad() inside forward asks for gradients by a parameter or by a tensor that forward has made: let the "
            "module around it be a leaf, whose gradients every rank computes whole",
            where=recorder.where(),
        )
    raise UntraceableError(
        f"{func.__name__}() inside forward asks for gradients that are differentiated again: write them with "
        "torch.func inside forward, as torch.func.grad(f)(x), which is planned",
        where=recorder.where(),
    )


def check_whole_inputs(graph: fx.Graph) -> None:
    """Raise InputError, for inputs of which each rank has a part, where forward asks for gradients by an input.

    Such a gradient is computed whole on every rank, by what was gathered of the input: of that the rank's part is no
    part that autograd knows.
    """
    for node in graph.nodes:
        if node.target is torch.autograd.grad:
            raise InputError(
                "forward asks for gradients by an input (torch.autograd.grad), which every rank computes of the whole "
                f'batch, and with inputs="local" it has a part: plan with inputs="global" [at {node.meta.get(PLACE)}]'
            )


def hooked(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """It would hang on a data-free tensor, and no gradient would come. As a leaf it might get one rank's rows."""
    raise UntraceableError(
        "register_hook() in forward changes or reads a gradient, which calls of the graph would not do: write it as "
        "the backward of a torch.autograd.Function",
        where=recorder.where(),
    )


def dual(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Of a level that is over when the graph runs."""
    raise UntraceableError(
        "make_dual() inside forward differentiates in forward mode: write it as torch.func.jvp(f, (x,), (direction,)), "
        "which is planned",
        where=recorder.where(),
    )
