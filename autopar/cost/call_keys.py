"""When two nodes are the same call: what their cost, their strategies and their place in a block depend on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import GRAD_MODE, VAL, TensorRef, resolve
from autopar.leaf_calls import LeafCall

_PLAIN = (int, str, bool, type(None), torch.dtype, torch.device)


def call_key(node: fx.Node) -> Hashable:
    """What a node's cost depends on: target, constants, and of each tensor shape, strides, dtype, requires_grad."""
    first: dict[TensorRef, int] = {}
    value = node.meta.get(VAL)
    outputs: Hashable = _facts(value) if isinstance(value, torch.Tensor) else _structure(value)
    grad_mode = node.meta.get(GRAD_MODE, True)
    arguments = (
        tuple(_frozen(a, first) for a in node.args),
        tuple((k, _frozen(a, first)) for k, a in node.kwargs.items()),
    )
    return (node.op, _frozen(node.target), arguments, outputs, grad_mode)


def _facts(tensor: torch.Tensor) -> Hashable:
    """What distinguishes one data-free tensor from another."""
    return tensor.shape, tensor.stride() if tensor.layout == torch.strided else None, tensor.dtype, tensor.requires_grad


def _structure(value: Any) -> Hashable:
    """The same of a tuple, list or dict of tensors and other values."""
    leaves, spec = pytree.tree_flatten(value)
    return str(spec), tuple(_facts(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _frozen(value: Any, first: dict[TensorRef, int] | None = None) -> Hashable:
    """A hashable form of arguments; nodes become the facts of their tensors, and which are the same tensor."""
    if isinstance(value, fx.Node):
        assert first is not None
        refs = resolve(value)
        held = value.meta.get(VAL)
        if isinstance(held, torch.Tensor):
            return first.setdefault(refs[0], len(first)), _facts(held)
        return "node", tuple(first.setdefault(ref, len(first)) for ref in refs), _structure(held)
    if type(value) in _PLAIN:
        return type(value), value  # 1 and True are equal, and not the same constant
    if isinstance(value, LeafCall):
        return value.kind
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_frozen(item, first) for item in value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item, first)) for key, item in value.items())
    if isinstance(value, slice):
        return ("slice", _frozen(value.start, first), _frozen(value.stop, first), _frozen(value.step, first))
    if isinstance(value, float):
        return float, repr(value)  # of 0.0 and -0.0 too
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return (type(value), value)
