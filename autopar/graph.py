"""The annotated graph: which facts its nodes carry, and the questions every stage asks of a node.

The graph is a `torch.fx.Graph`. This is the list of all names in `node.meta`:

=============  ==========================================================================
VAL            data-free value: a meta tensor (`requires_grad` set where a gradient flows),
               a plain Python value, or a tuple, list or dict of them
SCOPE          module stack, outermost first: ((path, type name), ...); () in the root
REGION         path of `torch.utils.checkpoint` region numbers; () outside
PLACE          "file:line" in the user's code
OF_DATA        present if the value is a number that depends on data, as that of `.item()`
NO_VALUE       present if it is a buffer of a few integers on the meta device, whose value decides how a layer works
EXAMPLE        of an input: the caller's example; its dtype may differ from VAL's, to which it is cast
KNOWN          real value of a tensor computed from constants alone
GRAD_MODE      whether grad mode was on
AUTOCAST       autocast state, () when off
BIAS_OF        of the addition of a bias that the trace split from its product: the product's node
TRIAL_FLOPS    of a leaf that cannot run on data-free tensors: FLOPs of the trial run, on random data
               or on guessed inputs, from which the trace learned its outputs
COST           `cost.NodeCost`
FIRST_WRITES   of a parameter: the writes of forward into it that precede any read, in order:
               ((method, arguments, keyword arguments), ...). Each write acts elementwise; its arguments
               are numbers, other parameters, buffers, values computed from them (`autopar.ops.first_writes`)
STATE          of an input that is a state: index of the output that the next call gets as this state, or -1
STATE_OF       of an input that is a state: the module's attribute, as in 'model.layers.0.h'
ROWS           of an input that is a state: the dim of the batch's rows where it is known, -1 if it has none;
               of another input of a later call: -1 if it has no dim of rows
KIND           set by `cost.ops.annotation`, not on leaves: a number, equal for calls of one graph that do
               the same (target, constants, facts of inputs and outputs)
FORM           set with KIND, and finer: equal for calls of one kind whose arguments are also written alike
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
NO_VALUE = "no value"

_NUMBERS = (int, float, type(None))  # values that hold no tensor
_SINGLE = frozenset((*_NUMBERS, bool, str))  # arguments that hold no node


class TensorRef(NamedTuple):
    """One tensor of the graph: output number `index` of `node`, which is never a `getitem`."""

    node: fx.Node
    index: int  # type: ignore[assignment]  # hides the method tuple.index, which is never called on a TensorRef


def is_getitem(node: fx.Node) -> bool:
    """Whether the node only selects one value from a node's tuple, list or dict (indexing a tensor is an op)."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and not isinstance(node.args[0].meta.get(VAL), torch.Tensor)  # type: ignore[union-attr]
    )


def output_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The data-free tensors that a node yields, flattened in pytree order."""
    value = node.meta.get(VAL)
    if isinstance(value, torch.Tensor):  # the common case; called about ten times for each node
        return [value]
    if isinstance(value, _NUMBERS):  # nearly all other nodes: sizes
        return []
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def resolve(node: fx.Node) -> list[TensorRef]:
    """The tensors in a node's value; for a `getitem` node, as outputs of the node that made them."""
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
    """The tensors that a node reads, in the order of its arguments; a tensor read twice is listed twice."""
    refs: list[TensorRef] = []
    for source in input_nodes(node):
        value = source.meta.get(VAL)
        if isinstance(value, torch.Tensor) and source.target is not operator.getitem:  # the common case
            refs.append(TensorRef(source, 0))
        elif not isinstance(value, _NUMBERS):
            refs += resolve(source)
    return refs


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a tensor that `node` makes: its users, and the readers of `getitem` nodes among them."""
    if not output_tensors(node):
        return
    for user in node.users:
        if output_tensors(user) or user.op == "output":
            yield user
        if is_getitem(user):
            yield from readers_of(user)


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes in a node's arguments, in order, repeated as often as they occur."""
    nodes: list[fx.Node] = []
    for value in node.args:  # the common case: nodes and numbers
        kind = type(value)
        if kind is fx.Node:
            nodes.append(value)  # type: ignore[arg-type]
        elif kind not in _SINGLE:
            _collect((value,), nodes)
    if node.kwargs:
        _collect(node.kwargs.values(), nodes)
    return nodes


def _collect(values: Iterable[Any], nodes: list[fx.Node]) -> None:
    """Append the nodes in `values`, including those in nested containers, to `nodes`."""
    for value in values:
        if isinstance(value, fx.Node):
            nodes.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, nodes)
        elif isinstance(value, dict):
            _collect(value.values(), nodes)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), nodes)


def storage_of(value: Any) -> int | None:
    """Identity of a data-free tensor's storage; None for other values, and for tensors without storage (sparse)."""
    if isinstance(value, torch.Tensor) and torch._C._has_storage(value):
        return value.untyped_storage()._cdata
    return None


def tensor_of(ref: TensorRef) -> torch.Tensor:
    """The data-free tensor behind a reference."""
    value = ref.node.meta.get(VAL)
    return value if isinstance(value, torch.Tensor) else output_tensors(ref.node)[ref.index]


def given_dtype(node: fx.Node) -> torch.dtype:
    """For an input, the dtype that the caller passes; for any other node, the dtype of its tensor."""
    return (node.meta[EXAMPLE] if EXAMPLE in node.meta else tensor_of(TensorRef(node, 0))).dtype


def is_cast_input(node: fx.Node) -> bool:
    """Whether a node is an input that is cast: the caller passes it in another dtype than forward reads."""
    return EXAMPLE in node.meta and given_dtype(node) != tensor_of(TensorRef(node, 0)).dtype


def target_name(node: fx.Node) -> str:
    """The target as text: `torch.nn.functional.linear`, `Tensor.view`, a module's path."""
    if isinstance(node.target, str):
        return f"Tensor.{node.target}" if node.op == "call_method" else node.target
    name = getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", repr(node.target))
    return f"{getattr(node.target, '__module__', '') or ''}.{name}".lstrip(".")
