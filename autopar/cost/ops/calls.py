"""Calls one node of a graph on given tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.graph import VAL, TensorRef, resolve


class NoDataError(Exception):
    """An op does not run on data-free tensors. Caught within this package: the op's cost is then estimated."""


@contextmanager
def data_free(node: fx.Node) -> Iterator[None]:
    """Turns whatever an op raises on data-free tensors, which may be any exception, into NoDataError."""
    try:
        yield
    except Exception as error:
        raise NoDataError(f"{node}: {error}") from error


def arguments(node: fx.Node, tensors: Mapping[TensorRef, torch.Tensor]) -> tuple[Any, Any]:
    """The node's args and kwargs, with `tensors` in place of nodes, and the meta device in place of any other."""

    def value(source: fx.Node) -> Any:
        found = iter([tensors[ref] for ref in resolve(source)])
        return pytree.tree_map(lambda v: next(found) if isinstance(v, torch.Tensor) else v, source.meta[VAL])

    def meta(constant: Any) -> Any:
        return torch.device("meta") if isinstance(constant, torch.device) else constant

    args, kwargs = pytree.tree_map(meta, fx.map_arg((node.args, node.kwargs), value))
    return args, {**kwargs, "device": torch.device("meta")} if "device" in kwargs else dict(kwargs)


def callable_of(node: fx.Node, root: nn.Module | None) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """What the node calls, and the tensors that it owns: the state of a leaf module in `root`, data-free."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target)), []
    if node.op == "call_function":
        assert callable(node.target)
        return node.target, []
    if root is None:
        raise InputError(f"the graph has no root that holds the leaf module {node.target}: give annotate its root")
    module = root.get_submodule(str(node.target))
    state = {
        name: torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    return lambda *args, **kwargs: torch.func.functional_call(module, state, args, kwargs), list(state.values())
