"""When two nodes are the same call: what their cost, their strategies and their place in a block depend on."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import GRAD_MODE, VAL, TensorRef, resolve, target_name
from autopar.leaf_calls import LeafCall

_PLAIN = (int, str, bool, type(None), torch.dtype, torch.device)
_SCALARS = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "truediv",
        "true_divide",
        "dropout",
        "bernoulli",
        "scaled_dot_product_attention",
    ]
)
"""Whose cost and strategies depend on a number among their arguments only by its sign, and by whether it is 0 or 1."""


def call_key(node: fx.Node) -> Hashable:
    """What a node's cost and strategies depend on: target, constants, and of each tensor shape, strides, dtype,
    requires_grad.

    Some constants decide nothing, and differ from one block to the next: which entry of a tensor is taken, factors
    that grow with depth, probabilities of dropping. They are left out: such blocks are equal (`autopar.cost.blocks`).
    """
    first: dict[TensorRef, int] = {}
    value = node.meta.get(VAL)
    outputs: Hashable = _facts(value) if isinstance(value, torch.Tensor) else _structure(value)
    grad_mode = node.meta.get(GRAD_MODE, True)
    args, kwargs = _deciding(node)
    arguments = tuple(_frozen(a, first) for a in args), tuple((k, _frozen(a, first)) for k, a in kwargs.items())
    return (node.op, _frozen(node.target), arguments, outputs, grad_mode)


def _deciding(node: fx.Node) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments, with the same in place of constants that decide nothing."""
    if node.target is operator.getitem:
        taken_from: Any = node.args[0]
        index: Any = node.args[1]
        if isinstance(taken_from, fx.Node) and isinstance(taken_from.meta.get(VAL), torch.Tensor):
            entries = tuple([_any_entry(i) for i in index]) if isinstance(index, tuple) else _any_entry(index)
            return (taken_from, entries), {}
    elif _name(node).strip("_") in _SCALARS:
        return [_any_factor(a) for a in node.args], {k: _any_factor(a) for k, a in node.kwargs.items()}
    return node.args, node.kwargs


def _name(node: fx.Node) -> str:
    name = target_name(node).rpartition(".")[2]
    return str(node.args[0]) if name == "apply_inplace" else name  # its method is among its arguments


def _any_entry(index: Any) -> Any:
    return "entry" if type(index) is int else index


def _any_factor(value: Any) -> Any:
    if type(value) is not float or value in (0.0, 1.0, -1.0) or not math.isfinite(value):
        return value
    return math.copysign(0.5, value)


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
