"""Tensors in a call's arguments and results: dataclasses that hold tensors are opened, as tuples and dicts are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.tracing.contents.known import Known
from autopar.tracing.contents.unknown import UnknownNumber
from autopar.tracing.errors import ArgumentError
from autopar.tracing.picked.picked_rows import PickedRows

WITHOUT_CACHES = "training has no use for caches, set model.config.use_cache = False"


def flattened(value: Any, description: str) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure; ArgumentError for an object that holds tensors but cannot be opened.

    `description`: of the value, in the error.
    """
    leaves, spec = pytree.tree_flatten(value)
    unknown = {type(leaf): leaf for leaf in leaves if _holds_tensors(leaf)}
    if not unknown:
        return leaves, spec
    for kind, leaf in unknown.items():
        if not dataclasses.is_dataclass(leaf):
            is_cache = "cache" in f"{kind.__module__}.{kind.__name__}".lower()
            raise ArgumentError(
                f"{description} has tensors inside a {kind.__name__}, which the tracer does not open: "
                + (f"{WITHOUT_CACHES}; or " if is_cache else "")
                + "put them in a tuple, a dict or a dataclass"
            )
        pytree.register_dataclass(kind)
    return flattened(value, description)  # a dataclass may hold another one


def _holds_tensors(leaf: Any) -> bool:
    """Whether items or attributes of a leaf are tensors, dataclasses with tensors, or containers of these."""
    if isinstance(leaf, (torch.Tensor, Known, PickedRows, UnknownNumber, type)) or type(leaf).__module__ == "builtins":
        return False
    items: list[Any] = []
    if isinstance(leaf, Mapping):
        items = list(leaf.values())
    elif dataclasses.is_dataclass(leaf):  # a dataclass may have slots instead of `__dict__`
        items = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    else:
        items = list(getattr(leaf, "__dict__", {}).values())
    inside = pytree.tree_leaves(items)
    return any(isinstance(v, torch.Tensor) or (dataclasses.is_dataclass(v) and _holds_tensors(v)) for v in inside)
