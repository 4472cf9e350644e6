"""When two nodes count as the same call: then they have the same cost and strategies, and may be equal in blocks."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.cost.structure.memo import Memo
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
"""Ops for which a number among the arguments affects cost and strategies only by its sign and by being 0 or 1."""

_KINDS = itertools.count()


class CallKinds:
    """Numbers the calls of a graph. The *kind* is equal for calls of equal `call_key`; the *form* is equal for calls
    that are written alike, with the same constants on values of the same facts.

    Equal form implies equal kind and is cheap to see, and nearly all calls of a deep model share their form with
    others. So the key is computed only once for each form.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, int] = {}  # by key
        self._forms: dict[Hashable, tuple[int, int]] = {}  # by `_written`: the numbers of form and kind
        self._numbers: dict[Hashable, int] = {}  # numbers of facts
        self._facts: dict[fx.Node, int] = Memo(self._number)
        self._plain: dict[fx.Node, bool] = Memo(_is_plain)

    def of(self, node: fx.Node) -> tuple[int, int]:
        """The numbers of a call's form and kind."""
        written = self._written(node)
        numbers = self._forms.get(written)
        if numbers is None:
            key = call_key(node)
            if key not in self._kinds:
                self._kinds[key] = next(_KINDS)
            numbers = self._forms[written] = next(_KINDS), self._kinds[key]
        return numbers

    def _written(self, node: fx.Node) -> Hashable:
        """A key for a call's form. It includes which inputs are the same tensor, if any node is read twice or yields
        several tensors."""
        facts = self._facts.__getitem__
        key: list[Hashable] = [node.op, _frozen_target(node), facts(node), node.meta.get(GRAD_MODE, True)]
        key += [facts(a) if isinstance(a, fx.Node) else frozen(a, facts) for a in node.args]
        key += [(name, frozen(argument, facts)) for name, argument in node.kwargs.items()]
        read = input_nodes(node)
        if len(set(read)) < len(read) or not all(map(self._plain.__getitem__, read)):
            first: dict[TensorRef, int] = {}
            key += [tuple(first.setdefault(ref, len(first)) for ref in resolve(source)) for source in read]
        return tuple(key)

    def _number(self, node: fx.Node) -> int:
        return self._numbers.setdefault(_facts_of(node.meta.get(VAL)), len(self._numbers))


def call_key(node: fx.Node) -> Hashable:
    """What a node's cost and strategies depend on: target, constants, and of each tensor shape, strides, dtype,
    requires_grad.

    Some constants decide nothing but differ between blocks: which entry of a tensor is taken, factors that grow with
    depth, dropout probabilities. They are left out, so that such blocks are equal (`cost.structure.blocks`).
    """
    first: dict[TensorRef, int] = {}

    def read(source: fx.Node) -> Hashable:
        """The facts of a node's tensors, and their numbers in the order in which the call first reads them."""
        return tuple(first.setdefault(ref, len(first)) for ref in resolve(source)), _facts_of(source.meta.get(VAL))

    args, kwargs = _deciding(node)
    arguments = tuple(frozen(a, read) for a in args), tuple((k, frozen(a, read)) for k, a in kwargs.items())
    outputs = _facts_of(node.meta.get(VAL))
    return (node.op, _frozen_target(node), arguments, outputs, node.meta.get(GRAD_MODE, True))


def _deciding(node: fx.Node) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments, with constants that decide nothing replaced by a placeholder."""
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
    """Whether a node's value is one tensor that it makes itself, or a number."""
    value = node.meta.get(VAL)
    return type(value) in PLAIN or (isinstance(value, torch.Tensor) and not is_getitem(node))


def _facts_of(value: Any) -> Hashable:
    """What distinguishes data-free values; for tuples, lists and dicts their structure and their leaves' facts."""
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
