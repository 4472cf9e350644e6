"""Leaves (calls that run as one op) in a local graph: equal random numbers on all ranks, results as in the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from autopar.errors import InputError
from autopar.leaf_calls import LeafCall
from autopar.runtime.local import LocalContext
from autopar.runtime.randomness import seeded


class SeededLeaf:
    """A leaf whose random numbers come from the step's key, so they are the same on every rank and in a replay.

    `planned_result`: its data-free result in the trace. Raises InputError if the leaf returns something else, or
    tensors of other shapes, since the nodes that read the result were planned for these."""

    def __init__(self, leaf: LeafCall, context: LocalContext, planned_result: Any) -> None:
        self.__name__ = leaf.__name__
        self._leaf, self._context = leaf, context
        shapes = map(context.local_shape, range(len(context.shapes)))
        self._wanted = [
            next(shapes) if isinstance(v, torch.Tensor) else _noted(v) for v in pytree.tree_leaves(planned_result)
        ]
        self._keys = _keys(planned_result)

    def __call__(self, key: torch.Tensor, args: tuple[Any, ...]) -> Any:
        with seeded(key, self._context.position):
            result = self._leaf(*args)
        looks = [_noted(value) for value in pytree.tree_leaves(result)]
        if looks != self._wanted or _keys(result) != self._keys:
            self._refuse(looks, _keys(result))
        return result

    def _refuse(self, looks: Sequence[Any], keys: set[Any]) -> NoReturn:
        mend = " in each call"
        returned, planned = f"{len(looks)} values", str(len(self._wanted))
        if looks == self._wanted:
            returned, planned = f"a dict of {_list(keys)}", f"one of {_list(self._keys)}"
        elif len(looks) == len(self._wanted):
            mine, planned_look = next((a, b) for a, b in zip(looks, self._wanted, strict=True) if a != b)
            returned, planned = _shown(mine), _shown(planned_look)
            if isinstance(mine, tuple) and isinstance(planned_look, tuple):
                returned, planned = f"a tensor of shape {mine}", str(planned_look)
                mend = " shape in each call, padded where data decide (total_length of pad_packed_sequence, say)"
        raise InputError(
            f"the {self._leaf.noun} '{self._leaf.path}', which runs as one op, returned {returned}, but was planned "
            f"with {planned}: let it return the same{mend}"
            + (f". It is one op because of this: {self._leaf.reason}" if self._leaf.reason else "")
        )


def _noted(value: Any) -> Any:
    """A value in the form that is compared: the shape of a tensor, a number or text itself, NaN as text."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, float):
        return "NaN" if value != value else value
    return value if isinstance(value, (bool, int, str)) else type(value)


def _keys(result: Any) -> set[Any]:
    """The keys of a dict; empty for any other result."""
    return set(result) if isinstance(result, dict) else set()


def _list(keys: set[Any]) -> str:
    return ", ".join(sorted(map(repr, keys))) or "nothing"


def _shown(noted: Any) -> str:
    """A compared value in words."""
    if isinstance(noted, type):
        return "None" if noted is type(None) else f"a {noted.__name__}"
    return f"a tensor of shape {noted}" if isinstance(noted, tuple) else repr(noted)
