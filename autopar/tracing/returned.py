"""What a forward returns, as flat outputs: dataclasses that hold tensors are looked into, as tuples and dicts are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.errors import TraceError


def flattened(returned: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; TraceError for an object that holds tensors where they cannot be reached."""
    leaves, spec = pytree.tree_flatten(returned)
    unknown = {type(leaf): leaf for leaf in leaves if _holds_tensors(leaf)}
    if not unknown:
        return leaves, spec
    for kind, leaf in unknown.items():
        if not dataclasses.is_dataclass(leaf):
            raise TraceError(
                f"forward returns an object of {kind.__name__}, which holds tensors: return them in a tuple, a dict or "
                "a dataclass"
            )
        pytree.register_dataclass(kind)
    return flattened(returned)  # one may hold another


def _holds_tensors(leaf: Any) -> bool:
    """Whether attributes of a leaf hold tensors, or dataclasses that do."""
    if isinstance(leaf, (torch.Tensor, type)) or not hasattr(leaf, "__dict__"):
        return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)  # one with slots
    held = pytree.tree_leaves(dict(vars(leaf)))
    return any(isinstance(v, torch.Tensor) or (v is not leaf and dataclasses.is_dataclass(v)) for v in held)
