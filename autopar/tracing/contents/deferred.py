"""Known values that are too large to keep: only how to compute them is kept, and they are computed when asked for.

For example, a model makes a mask of (batch, 1, length, length), slices one row from it, and branches on that row. The
mask takes a hundred megabytes at a typical batch size for training; its recipe is a call and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BYTES = 1 << 28  # bytes of one value while it is computed; larger ones are unknown


@dataclass(frozen=True)
class _Recipe:
    """`compute` gives the value; `sources`: the tensors it uses, each with its version when the call was recorded."""

    compute: Callable[[], Any]
    sources: tuple[tuple[torch.Tensor, int], ...]


class Deferred:
    """Recipes by data-free tensor. A recipe is void once its tensor, or one of its sources, is written into."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}

    def put(self, tensor: torch.Tensor, compute: Callable[[], Any], sources: list[torch.Tensor]) -> None:
        """`sources`: all tensors whose contents `compute` depends on, data-free or real, including views."""
        if tensor.nbytes > BYTES:
            return
        versions = {id(t): (t, t._version) for t in (tensor, *sources)}
        for source in sources:  # and the sources of sources that are deferred themselves
            if id(source) in self._recipes:
                versions |= {id(t): (t, version) for t, version in self._recipes[id(source)].sources}
        self._recipes[id(tensor)] = _Recipe(compute, tuple(versions.values()))

    def knows(self, tensor: torch.Tensor) -> bool:
        recipe = self._recipes.get(id(tensor))
        return recipe is not None and all(source._version == version for source, version in recipe.sources)

    def value(self, tensor: torch.Tensor) -> Any:
        return self._recipes[id(tensor)].compute()

    def clear(self) -> None:
        """Drop all references to tensors."""
        self._recipes.clear()
