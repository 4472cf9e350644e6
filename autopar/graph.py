"""The annotated graph: which facts its nodes carry, and the questions every stage asks of a node.

The graph is a `torch.fx.Graph`. Names in `node.meta`, the only place where they are listed:

=============  ==========================================================================
VAL            data-free value: a meta tensor (`requires_grad` set where a gradient flows),
               a plain Python value, or a tuple, list or dict of them
SCOPE          module stack, outermost first: ((path, type name), ...); () in the root
REGION         path of `torch.utils.checkpoint` region numbers; () outside
PLACE          "file:line" in the user's code
OF_DATA        there where the value is a number that only data tells
EXAMPLE        of an input: the caller's example, whose dtype may be another than that in which it is read
KNOWN          real value of a tensor computed from constants alone
GRAD_MODE      whether grad mode was on
AUTOCAST       autocast state, () when off
BIAS_OF        on the addition of a split bias: the product node it belongs to
TRIAL_FLOPS    of a leaf that cannot run on data-free tensors: FLOPs of the run, on random data or
               on guesses, that told its outputs
COST           `cost.NodeCost`
FIRST_WRITES   of a parameter: what forward writes into it before anything reads it, in order:
               ((method, arguments, keyword arguments), ...), the same for each element; arguments are
               numbers, other parameters and what is computed of them (`autopar.ops.first_writes`)
STATE          of an input that is a state: which of the outputs is what the next call is given, -1 without
STATE_OF       of an input that is a state: the attribute, as in 'model.layers.0.h'
ROWS           of an input that is a state: along which dim its rows lie where that is known, -1 for none; so of any
               other input of a later call that is taken for no rows
KIND           of a call that was annotated: a number, equal for calls of one graph that do the same
               (target, constants, facts of inputs and outputs); gone where it was not
FORM           of a call that was annotated: a number, equal for calls that are written alike: of a kind
               and with the same constants; gone where it was not
=============  ==========================================================================
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

VAL = "val"
SCOPE = "scope"
REGION = "region"
PLACE = "place"
EXAMPLE = "example_value"
KNOWN = "known"
GRAD_MODE = "grad_mode"
AUTOCAST = "autocast"
BIAS_OF = "bias_of"
TRIAL_FLOPS = "trial_flops"
COST = "cost"
FIRST_WRITES = "first_writes"
STATE = "state"
STATE_OF = "state_of"
ROWS = "rows"
KIND = "kind"
FORM = "form"
OF_DATA = "of data"

_NUMBERS = (int, float, type(None))  # values that hold no tensor
_SINGLE = frozenset((*_NUMBERS, bool, str))  # arguments that hold no node


class TensorRef(NamedTuple):
    """One tensor of the graph: output number `index` of `node`, which is never a `getitem`."""

    node: fx.Node
    index: int  # type: ignore[assignment]  # tuple.index is a method that nobody asks a TensorRef for


def is_getitem(node: fx.Node) -> bool:
    """Whether the node only picks one value out of a tuple, list or dict that a node made."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and not isinstance(node.args[0].meta.get(VAL), torch.Tensor)  # type: ignore[union-attr]
    )


def output_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The data-free tensors that a node yields, flattened in pytree order."""
    value = node.meta.get(VAL)
    if isinstance(value, torch.Tensor):  # nearly always; asked some ten times a node
        return [value]
    if isinstance(value, _NUMBERS):  # nearly all others: sizes
        return []
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def resolve(node: fx.Node) -> list[TensorRef]:
    """The tensors that a value in the graph stands for, seen through `getitem` nodes."""
    if not is_getitem(node):
        return [TensorRef(node, i) for i in range(len(output_tensors(node)))]
    source, key = node.args
    assert isinstance(source, fx.Node)
    whole = source.meta[VAL]
    refs = iter(resolve(source))
    marked = pytree.tree_map(lambda v: next(refs) if isinstance(v, torch.Tensor) else v, whole)
    return [
        r
        for r in pytree.tree_leaves(marked[key], is_leaf=lambda v: isinstance(v, TensorRef))
        if isinstance(r, TensorRef)
    ]


def tensor_inputs(node: fx.Node) -> list[TensorRef]:
    """The tensors that a node reads, one entry an occurrence, in the order of its arguments."""
    found: list[TensorRef] = []
    for source in input_nodes(node):
        value = source.meta.get(VAL)
        if isinstance(value, torch.Tensor) and source.target is not operator.getitem:  # nearly always
            found.append(TensorRef(source, 0))
        elif not isinstance(value, _NUMBERS):
            found += resolve(source)
    return found


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a tensor that a node makes: its users; those that pick it from a tuple, and their readers."""
    if not output_tensors(node):
        return
    for user in node.users:
        if output_tensors(user) or user.op == "output":
            yield user
        if is_getitem(user):
            yield from readers_of(user)


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes in a node's arguments, in order, repeated as often as they occur."""
    found: list[fx.Node] = []
    for value in node.args:  # nearly always nodes and numbers
        kind = type(value)
        if kind is fx.Node:
            found.append(value)  # type: ignore[arg-type]
        elif kind not in _SINGLE:
            _collect((value,), found)
    if node.kwargs:
        _collect(node.kwargs.values(), found)
    return found


def _collect(values: Iterable[Any], found: list[fx.Node]) -> None:
    """Add the nodes in some arguments."""
    for value in values:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), found)


def storage_of(value: Any) -> int | None:
    """Identity of the storage behind a data-free value; None for what is no tensor, or has none, as a sparse one."""
    if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
        return value.untyped_storage()._cdata
    return None


def tensor_of(ref: TensorRef) -> torch.Tensor:
    """The data-free tensor behind a reference."""
    value = ref.node.meta.get(VAL)
    return value if isinstance(value, torch.Tensor) else output_tensors(ref.node)[ref.index]


def given_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of what the caller gives for an input; of others, their own."""
    return (node.meta[EXAMPLE] if EXAMPLE in node.meta else tensor_of(TensorRef(node, 0))).dtype


def is_cast_input(node: fx.Node) -> bool:
    """Whether a node is an input that is given in another dtype than that in which it is read."""
    return EXAMPLE in node.meta and given_dtype(node) != tensor_of(TensorRef(node, 0)).dtype


def target_name(node: fx.Node) -> str:
    """The target as text: `torch.nn.functional.linear`, `Tensor.view`, a module's path."""
    if isinstance(node.target, str):
        return f"Tensor.{node.target}" if node.op == "call_method" else node.target
    name = getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", repr(node.target))
    return f"{getattr(node.target, '__module__', '') or ''}.{name}".lstrip(".")
