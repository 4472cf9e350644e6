"""Leaves that treat each row of the batch independently, which is proven op by op from sharding rules.

A module that unrolls a loop over time becomes a leaf because its graph would be too long for a plan. A single such
module can still be traced by itself, and the rules of its ops show whether rows of its inputs ever interact. If they do
not, the leaf gets a rule that shards the rows and replicates its parameters. A leaf that cannot be traced by itself
runs whole, since nothing is known about its rows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, RuleError
from autopar.graph import PLACE, TensorRef, is_getitem, output_tensors, tensor_inputs, tensor_of
from autopar.leaf_calls import LeafCall
from autopar.ops.random_ops import draws
from autopar.strategies.arguments import op_name, value
from autopar.strategies.bind import Spot
from autopar.strategies.positions import position_at
from autopar.strategies.table import bound_rule
from autopar.tracing import trace
from autopar.tracing.rewriting.cleaning import WRITES

_ROWS = Spot(0, 1)  # in dim 0, with no factor before
_SHAPED = {"view", "reshape", "expand", "repeat", "unflatten"}  # ops whose sizes may include the number of rows
_OF_DTYPE = {"to", "type_as"}  # ops that read only the dtype of a second tensor, no element
_FILLED = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"}  # equal rows
_ADAPTING = {"", "shape", "split", "slice", "groups"}  # local code that the leaf's own code makes unnecessary


class Together(Exception):
    """Rows of the batch interact, or may."""


class Split(NamedTuple):
    """How a leaf may be split: a rule, or why there is none."""

    rule: str | None
    why: str = ""


def find_splits(graph: fx.Graph) -> None:
    """Set `rule` of each module leaf that can be sharded along its inputs' rows, and `whole` (why not) of others.

    `graph` comes from `show_leaf_tensors`. Leaves of the same kind with inputs of the same shapes are traced once.
    """
    splits: dict[Hashable, Split] = {}
    for node in graph.nodes:
        call = node.target
        if not isinstance(call, LeafCall) or call.noun != LeafCall.noun:
            continue
        key = (call.kind, _options(call.module), _described(value(node.args)))
        if key not in splits:
            splits[key] = _split(node, call)
        call.rule, call.whole = splits[key]


def _options(module: nn.Module) -> str:
    """The plain values that a module and its submodules hold, without the index of their layer (`layer_idx`)."""
    plain = (bool, int, float, str, torch.dtype, type(None))
    parts = [vars(part).items() for part in module.modules()]
    plain_values = [[(k, v) for k, v in part if isinstance(v, plain) and not k.startswith("layer_")] for part in parts]
    return repr(plain_values)


def _described(arguments: Any) -> str:
    leaves, structure = pytree.tree_flatten(arguments)
    facts = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves]
    return repr((structure, facts))


def _split(node: fx.Node, call: LeafCall) -> Split:
    """Trace a leaf's module alone on the node's inputs, and check that the rows of the first input stay independent."""
    own, args, kwargs = node.args
    try:
        bound = inspect.signature(call.module.forward).bind(*value(args), **value(kwargs))
    except TypeError as error:
        return Split(None, str(error))
    kinds = {p.kind for n, p in bound.signature.parameters.items() if n in bound.arguments}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return Split(None, "it takes any number of arguments")
    named = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    tensors = [t for t in pytree.tree_leaves(named) if isinstance(t, torch.Tensor) and t.dim()]
    rows = tensors[0].shape[0] if tensors else 1
    if rows == 1:
        return Split(None, "its first input has one row")
    floating = [t for t in value(own) if isinstance(t, nn.Parameter) and t.is_floating_point()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = trace(call.module, named, parameter_dtype=floating[0].dtype if floating else None)
    except AutoparError as error:
        return Split(None, error.message)
    except Exception as error:  # user code may raise anything on made-up arguments
        return Split(None, f"{type(error).__name__}: {error}")
    inputs = [n for n in traced.graph.nodes if n.op == "placeholder"]
    try:
        _check(traced.graph, [n for n in inputs if _has_rows(output_tensors(n)[0], rows)])
    except Together as error:
        return Split(None, str(error))
    refs = tensor_inputs(node)
    operands = [
        _operand(tensor_of(ref), i >= len(call.names) and _has_rows(tensor_of(ref), rows)) for i, ref in enumerate(refs)
    ]
    results = [_operand(t, True) for t in output_tensors(node)]
    return Split(f"{', '.join(operands)} -> {', '.join(results)}")


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _operand(tensor: torch.Tensor, split: bool) -> str:
    """
    >>> _operand(torch.ones(2, 3), True), _operand(torch.ones(2, 3), False)
    ('b _', '_ _')
    """
    return " ".join(["b" if split else "_", *"_" * (tensor.dim() - 1)][: tensor.dim()])


def _check(graph: fx.Graph, inputs: Iterable[fx.Node]) -> None:
    """Raise Together unless every output has the rows of `inputs` in dim 0, and rows interact in no op."""
    spots = {TensorRef(node, 0): _ROWS for node in inputs}
    counts: dict[fx.Node, bool] = {}  # numbers computed from the number of rows; True: it is exactly that number
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or is_getitem(node):
            continue
        refs = tensor_inputs(node)
        if node.op == "output":
            if any(spots.get(ref) != _ROWS for ref in refs):
                raise Together("it returns what has no rows")
            if any(source in counts for source in node.all_input_nodes):
                raise Together("it returns a number that depends on how many rows there are")
            return
        if WRITES in node.meta:
            raise Together(f"{_named(node)} writes into what outlives it")
        counted = [source for source in node.all_input_nodes if source in counts]
        if not output_tensors(node):
            spot = spots.get(refs[0]) if refs else None
            if counted or (spot is not None and _is_count(node, spot)):
                counts[node] = not counted and len(node.args) > 1
        elif op_name(node) not in _FILLED and any(ref in spots for ref in refs):
            _follow(node, refs, spots, bool(counted))
        elif counted:
            spots[TensorRef(node, 0)] = _filled(node, counts)


def _is_count(node: fx.Node, spot: Spot) -> bool:
    """Whether a node that asks a tensor with rows for a property learns the number of rows."""
    if op_name(node) != "size" or len(node.args) < 2:
        return True
    dim = node.args[1]
    return not isinstance(dim, int) or dim % tensor_of(tensor_inputs(node)[0]).dim() == spot.dim


def _filled(node: fx.Node, counts: dict[fx.Node, bool]) -> Spot:
    """The row dim of a tensor of equal rows that is created with the number of rows as a size."""
    sizes = [size for size in pytree.tree_leaves(list(node.args)) if isinstance(size, (int, fx.Node))]
    if op_name(node).startswith("new_"):
        sizes = sizes[1:]
    row_dims = [(dim, counts[size]) for dim, size in enumerate(sizes) if isinstance(size, fx.Node) and size in counts]
    if op_name(node) not in _FILLED or [is_number for _, is_number in row_dims] != [True]:
        raise Together(f"{_named(node)} makes a tensor after the number of rows")
    return Spot(row_dims[0][0], 1)


def _follow(node: fx.Node, refs: list[TensorRef], spots: dict[TensorRef, Spot], counted: bool) -> None:
    """Note the row dim of an op's results; raise Together where its rule does not prove that rows stay independent."""
    name = op_name(node)
    try:
        bound = bound_rule(node)
    except RuleError as error:
        raise Together(f"{_named(node)}: {error.message}") from error
    if bound is None:
        raise Together(f"{_named(node)} has no rule")
    read = refs[:1] if name in _OF_DTYPE else refs
    places = {position_at(bound, t, spots[ref]) for t, ref in enumerate(read) if ref in spots}
    place = places.pop() if places else None
    if places or place is None or not bound.factors[place.factor].splits_at(place.outer):
        raise Together(f"rows meet in {_named(node)}")
    if any(bound.spots[t][place.factor] is not None for t, ref in enumerate(refs) if ref not in spots):
        raise Together(f"rows meet what is no row in {_named(node)}")
    adapts = bound.operation.local in _ADAPTING and bound.factors[place.factor].note.local in _ADAPTING
    if not adapts or "always" in bound.operation.words or draws(node):
        raise Together(f"{_named(node)} on some of the rows alone does something else")
    numbers = [n for n in pytree.tree_leaves(list(node.args[1:])) if isinstance(n, int)]
    if (counted and name not in _SHAPED) or (name in _SHAPED and not counted and -1 not in numbers):
        raise Together(f"{_named(node)} takes a number that may be that of the rows")
    for i, spot_of_factor in enumerate(spot[place.factor] for spot in bound.spots[bound.inputs :]):
        if spot_of_factor is None:
            raise Together(f"rows are joined in {_named(node)}")
        spots[TensorRef(node, i)] = Spot(spot_of_factor.dim, spot_of_factor.outer * place.outer)


def _named(node: fx.Node) -> str:
    place = node.meta.get(PLACE, "")
    return f"{op_name(node) or node.name}{f' ({place})' if place else ''}"
