"""When two nodes are the same call: what their cost, their strategies and their place in a block depend on."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.cost.structure.found import Found
from autopar.fingerprints.frozen import PLAIN, frozen
from autopar.graph import GRAD_MODE, VAL, TensorRef, input_nodes, is_getitem, resolve, target_name

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

_KINDS = itertools.count()


class CallKinds:
    """Numbers the calls of a graph, equal for calls of equal keys (`call_key`), and the ways in which they are written.

    Nearly all calls of a deep model are written as others are: with the same constants, on values of the same facts.
    Of those, which is told at a glance, one is looked at.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, int] = {}  # by key
        self._forms: dict[Hashable, tuple[int, int]] = {}  # by what is written: its number, and that of the kind
        self._numbers: dict[Hashable, int] = {}  # of facts
        self._facts: dict[fx.Node, int] = Found(self._number)
        self._plain: dict[fx.Node, bool] = Found(_is_plain)

    def of(self, node: fx.Node) -> tuple[int, int]:
        """The number of the way in which a call is written, and that of its kind."""
        written = self._written(node)
        found = self._forms.get(written)
        if found is None:
            key = call_key(node)
            if key not in self._kinds:
                self._kinds[key] = next(_KINDS)
            found = self._forms[written] = next(_KINDS), self._kinds[key]
        return found

    def _written(self, node: fx.Node) -> Hashable:
        """A call as it is written. Which inputs are the same tensor is part of it: where some are, or come from a call
        that yields several, that is asked of each."""
        facts = self._facts.__getitem__
        found: list[Hashable] = [node.op, _frozen_target(node), facts(node), node.meta.get(GRAD_MODE, True)]
        found += [facts(a) if isinstance(a, fx.Node) else frozen(a, facts) for a in node.args]
        found += [(name, frozen(argument, facts)) for name, argument in node.kwargs.items()]
        read = input_nodes(node)
        if len(set(read)) < len(read) or not all(map(self._plain.__getitem__, read)):
            first: dict[TensorRef, int] = {}
            found += [tuple(first.setdefault(ref, len(first)) for ref in resolve(source)) for source in read]
        return tuple(found)

    def _number(self, node: fx.Node) -> int:
        return self._numbers.setdefault(_facts_of(node.meta.get(VAL)), len(self._numbers))


def call_key(node: fx.Node) -> Hashable:
    """What a node's cost and strategies depend on: target, constants, and of each tensor shape, strides, dtype,
    requires_grad.

    Some constants decide nothing, and differ from one block to the next: which entry of a tensor is taken, factors
    that grow with depth, probabilities of dropping. They are left out: such blocks are equal (`cost.structure.blocks`).
    """
    first: dict[TensorRef, int] = {}

    def read(source: fx.Node) -> Hashable:
        """The facts of a node's tensors, and which of those read so far they are."""
        return tuple(first.setdefault(ref, len(first)) for ref in resolve(source)), _facts_of(source.meta.get(VAL))

    args, kwargs = _deciding(node)
    arguments = tuple(frozen(a, read) for a in args), tuple((k, frozen(a, read)) for k, a in kwargs.items())
    outputs = _facts_of(node.meta.get(VAL))
    return (node.op, _frozen_target(node), arguments, outputs, node.meta.get(GRAD_MODE, True))


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


def _is_plain(node: fx.Node) -> bool:
    """Whether a node stands for one tensor of its own, or for a number."""
    value = node.meta.get(VAL)
    return type(value) in PLAIN or (isinstance(value, torch.Tensor) and not is_getitem(node))


def _facts_of(value: Any) -> Hashable:
    """What distinguishes one data-free value from another: of tuples, lists and dicts, that of what they hold."""
    if isinstance(value, torch.Tensor):
        return _facts(value)
    if type(value) in PLAIN:
        return type(value), value
    leaves, spec = pytree.tree_flatten(value)
    return str(spec), tuple(_facts(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _facts(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride() if tensor.layout == torch.strided else None, tensor.dtype, tensor.requires_grad


def _frozen_target(node: fx.Node) -> Hashable:
    return node.target if isinstance(node.target, str) else frozen(node.target, _no_node)


def _no_node(node: fx.Node) -> Hashable:
    raise AssertionError(f"{node} is no target")
