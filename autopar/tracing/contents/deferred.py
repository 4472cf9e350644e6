"""Known values too large to keep: how they are computed is kept, and they are computed when something is asked.

A mask of (batch, 1, length, length) that the model itself makes is cut to one row, and a branch asks that row. The
mask is a hundred megabytes at a batch that one would train with, its recipe is a call and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BYTES = 1 << 28  # of one value while it is computed


@dataclass(frozen=True)
class _Recipe:
    """`compute` of the values of `sources`, each with the version of its contents when the call was recorded."""

    compute: Callable[[], Any]
    sources: tuple[tuple[torch.Tensor, int], ...]


class Deferred:
    """Recipes by data-free tensor. None holds once its tensor, or what it is made from, has been written."""

    def __init__(self) -> None:
        self._recipes: dict[int, _Recipe] = {}

    def put(self, tensor: torch.Tensor, compute: Callable[[], Any], sources: list[torch.Tensor]) -> None:
        """`sources`: all tensors whose contents decide what `compute` returns, data-free or real; views count."""
        if tensor.nbytes > BYTES:
            return
        found = {id(t): (t, t._version) for t in (tensor, *sources)}
        for source in sources:  # what these are computed from decides, too
            if id(source) in self._recipes:
                found |= {id(t): (t, version) for t, version in self._recipes[id(source)].sources}
        self._recipes[id(tensor)] = _Recipe(compute, tuple(found.values()))

    def knows(self, tensor: torch.Tensor) -> bool:
        recipe = self._recipes.get(id(tensor))
        return recipe is not None and all(source._version == version for source, version in recipe.sources)

    def value(self, tensor: torch.Tensor) -> Any:
        return self._recipes[id(tensor)].compute()

    def clear(self) -> None:
        """Hold no tensor any more."""
        self._recipes.clear()
