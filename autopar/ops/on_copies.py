"""An in-place call as a function that returns what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.ops.random_ops import is_random


class OnCopies:
    """Runs `call` on copies of the tensors that it writes; returns the written copies, then the call's own result.

    `places`: for each written tensor, all its positions among the leaves of `(args, kwargs)`. `call`: a function, or
    the name of a tensor method. In the result, written tensors are replaced by None.

    >>> OnCopies(torch.Tensor.add_, [(0,)])(torch.zeros(2), 1)
    (tensor([1., 1.]), None)
    """

    __module__ = "autopar"

    def __init__(self, call: Callable[..., Any] | str, places: Sequence[Sequence[int]]) -> None:
        self.call, self.places = call, tuple(map(tuple, places))
        self.__name__ = "on_copies"
        self.__qualname__ = f"on_copies({self.title}, {self.places})"  # ranks compare it
        self.draws = is_random(call)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        written = []
        for places in self.places:
            copy = leaves[places[0]].clone()
            written.append(copy)
            for place in places:
                leaves[place] = copy
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if isinstance(self.call, str):
            result = getattr(args[0], self.call)(*args[1:], **kwargs)
        else:
            result = self.call(*args, **kwargs)
        return *written, without(result, written)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnCopies) and (self.call, self.places) == (other.call, other.places)

    def __hash__(self) -> int:
        return hash((self.call, self.places))

    def __str__(self) -> str:
        return self.title

    @property
    def title(self) -> str:
        """The name for people."""
        if isinstance(self.call, str):
            return f"Tensor.{self.call}"
        return torch.overrides.resolve_name(self.call) or getattr(self.call, "__qualname__", str(self.call))


def without(result: Any, written: Sequence[torch.Tensor]) -> Any:
    """A call's result, with None in place of the tensors that it has written."""

    def own(tensor: torch.Tensor) -> torch.Tensor | None:
        return None if any(tensor is written_tensor for written_tensor in written) else tensor

    return pytree.tree_map_only(torch.Tensor, own, result)
