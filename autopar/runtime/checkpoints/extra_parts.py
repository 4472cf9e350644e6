"""Sharded tensors in `extra_state` (averaged weights, say), saved with the model's in parts that any mesh can read.

Each rank's file holds the rest of `extra_state`, with a mark in place of each such tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autopar.errors import InputError

_MARK = "autopar.part:"


def parted(extra_state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`extra_state` (the `state_dict()` of objects that have one) with marks for sharded tensors, and these tensors.

    Raises InputError for optimizers of a planned model: which state they will hold is not known before they have it.
    """
    for name, value in extra_state.items():
        if isinstance(value, Optimizer) and _has_parts(value):
            raise InputError(
                f"extra_state has an optimizer of a planned model, {name!r}: give it with the other one, "
                "optimizer=[first, second], which any mesh can read"
            )
    tensors: dict[str, torch.Tensor] = {}

    def marked(path: Any, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        key = pytree.keystr(path)
        tensors[key] = value
        return _MARK + key

    return pytree.tree_map_with_path(marked, _states(extra_state)), tensors


def places(path: Path, saved: Mapping[str, Any], extra_state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the marked tensors of `saved` are read into: those that the objects now have in these places.

    Raises InputError if an object has none there.
    """
    marks = [leaf for leaf in pytree.tree_leaves({name: saved[name] for name in extra_state}) if _is_mark(leaf)]
    tensors_here = {pytree.keystr(key): value for key, value in pytree.tree_leaves_with_path(_states(extra_state))}
    keys = [mark.removeprefix(_MARK) for mark in marks]
    if missing := [key for key in keys if not isinstance(tensors_here.get(key), torch.Tensor)]:
        raise InputError(f"{path} has tensors of extra_state{missing[0]} that are not in its state_dict() here")
    return {key: tensors_here[key] for key in keys}


def joined(states: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The states with marks replaced by their tensors."""
    return pytree.tree_map(lambda leaf: tensors[leaf.removeprefix(_MARK)] if _is_mark(leaf) else leaf, states)


def _states(extra_state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in extra_state.items()}


def _has_parts(optimizer: Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _is_mark(leaf: Any) -> bool:
    return isinstance(leaf, str) and leaf.startswith(_MARK)
