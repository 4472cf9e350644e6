"""Experts with their own loop over the experts that tokens are routed to: each call is one node, sharded along tokens.

Mixtures that do not use the library's common form (`leaves.experts`) are recognised where their loop asks for data: a
module of equal modules, or of stacked parameters, that is called with (hidden, routes, weights), whose first dims all
count tokens. Tokens pass through experts independently; but as nothing is known of how the module holds its experts,
only tokens are sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Tensor = torch.Tensor


class RoutedModule:
    """The call of such a module as a node's target: `routed(hidden, routes, weights, *parameters)`.

    hidden (tokens, width); routes (tokens, k) with indices of experts, or (tokens, k, experts) one-hot; weights
    (tokens, k); parameters by `names`, as the module has them. `draws`: whether it has active dropout.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__name__ = self.__qualname__ = "routed"
        self.module = module
        self.names = tuple(name for name, _ in module.named_parameters())
        dropouts = (
            dropout
            for dropout in module.modules()
            if isinstance(dropout, nn.modules.dropout._DropoutNd) and dropout.training
        )
        self.draws = any(dropout.p > 0 for dropout in dropouts)

    def __call__(self, hidden: Tensor, routes: Tensor, weights: Tensor, *tensors: Tensor) -> Tensor:
        parameters = dict(zip(self.names, tensors, strict=True))
        if hidden.device.type != "meta":
            return functional_call(self.module, parameters, (hidden, routes, weights))
        with _Mixed():  # the products have the same sizes for any routes
            return functional_call(self.module, parameters, (hidden, _all_to_the_first(routes), weights))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutedModule) and self._kind() == other._kind()

    def __hash__(self) -> int:
        return hash(type(self.module))

    def _kind(self) -> tuple[Any, ...]:
        return (type(self.module), self.names, self.module.training)


class _Mixed(TorchFunctionMode):
    """Allows tensors with and without data in one call: those with data become data-free."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if len({t.device.type for t in tensors}) > 1:
            args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **(kwargs or {}))


def is_routed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this is a call of experts, judged by its form."""
    if kwargs or len(args) != 3 or not all(isinstance(a, Tensor) for a in args):
        return False
    hidden, routes, weights = args
    tokens = hidden.shape[0] if hidden.ndim == 2 else None
    fits = weights.ndim == 2 and routes.ndim in (2, 3) and routes.shape[0] == weights.shape[0] == tokens
    kinds = hidden.is_floating_point() and weights.is_floating_point() and not routes.is_floating_point()
    return fits and kinds and _holds_experts(module)


def _holds_experts(module: nn.Module) -> bool:
    children = list(module.children())
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)):
        experts = [child for child in children if any(True for _ in child.parameters())]
        return len(experts) > 1 and len({type(child) for child in experts}) == 1
    own = list(module.parameters(recurse=False))
    stacked = [p for p in own if p.ndim == 3 and p.shape[0] > 1]
    return len(stacked) > 1 and len(own) == len(list(module.parameters()))


def _all_to_the_first(routes: Tensor) -> Tensor:
    """Routes with data in which every token goes to the first expert, k times."""
    numbers = torch.zeros(routes.shape, dtype=routes.dtype)
    if routes.ndim == 3:
        numbers[..., 0] = 1
    return numbers
