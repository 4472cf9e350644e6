"""Finds the rule of each node of a graph: a user's, the table's, or a discovered one."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.gradient_starts import RUN_WHOLE
from autopar.graph import (
    KIND,
    PLACE,
    SCOPE,
    VAL,
    TensorRef,
    is_getitem,
    output_tensors,
    target_name,
    tensor_inputs,
    tensor_of,
)
from autopar.leaf_calls import LeafCall
from autopar.strategies.arguments import output_shapes, qualified_name, tensors, user_name
from autopar.strategies.bind import Bound, bind
from autopar.strategies.discovery import Found, discover
from autopar.strategies.members import Member, RuledOp
from autopar.strategies.modes import TensorFact
from autopar.strategies.table import bound_rule, entry, is_registered, parse
from autopar.user_warnings import AutoparWarning, warn


class NoRuleWarning(AutoparWarning):
    """An op has no sharding rule and runs replicated."""


class Rules:
    """Binds rules to nodes, once for equal calls. Nodes in `constant` have no rule."""

    def __init__(self, constant: Collection[fx.Node]) -> None:
        self.constant = constant
        self._signatures: dict[int, Hashable] = {}
        self._ops: dict[Hashable, RuledOp | None] = {}
        self._warned: set[str] = set()

    def members(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, Member]:
        """The nodes that have a rule, as members; equal nodes share one `RuledOp`."""
        members: dict[fx.Node, Member] = {}
        for node in nodes:
            if not _is_op(node) or node in self.constant:
                continue
            if isinstance(node.target, LeafCall) and node.target.rule is None:
                continue  # a leaf without a rule runs unsplit: its results may depend on all of its inputs' elements
            refs = (*tensor_inputs(node), *(TensorRef(node, i) for i in range(len(output_tensors(node)))))
            op = self._op(node, refs)
            if op is not None:
                members[node] = Member(op, refs)
        return members

    def _op(self, node: fx.Node, refs: Sequence[TensorRef]) -> RuledOp | None:
        """What a node shares with equal ones; None if it has no rule."""
        kind = node.meta.get(KIND)
        key = _signature(node) if kind not in self._signatures else self._signatures[kind]
        if kind is not None:
            self._signatures[kind] = key
        if key not in self._ops:
            bound = _bound(node, self._warned)
            facts = tuple(TensorFact.of(tensor_of(ref)) for ref in refs)
            self._ops[key] = (
                RuledOp(bound, facts, _is_anchor(node, bound), _is_of_table(node)) if bound is not None else None
            )
        return self._ops[key]


def _is_op(node: fx.Node) -> bool:
    """Whether a node computes tensors."""
    is_call = node.op in ("call_function", "call_method", "call_module")
    return is_call and not is_getitem(node) and bool(output_tensors(node))


def unruled(graph: fx.Graph, constant: Collection[fx.Node], members: Mapping[fx.Node, Member]) -> Iterator[fx.Node]:
    """The ops that have no rule."""
    return (node for node in graph.nodes if _is_op(node) and node not in constant and node not in members)


def _is_anchor(node: fx.Node, bound: Bound) -> bool:
    """Whether the op's own factors are worth splitting. An op with a discovered rule is an anchor if some of its
    tensors lacks a factor, that is, if it is not elementwise."""
    table_entry = entry(node)
    if table_entry is not None:
        return table_entry.anchor
    return any(spot is None for spots in bound.spots for spot in spots)


def _is_of_table(node: fx.Node) -> bool:
    """Whether a node's rule is from the built-in table, and neither a user's nor a discovered one."""
    return entry(node) is not None and not is_registered(node) and not isinstance(node.target, LeafCall)


def _bound(node: fx.Node, warned: set[str]) -> Bound | None:
    """The node's rule, bound to its shapes: the user's, the table's or a discovered one. None if there is none; then it
    warns, once for each op.

    A user's rule that does not fit the node is an error.
    """
    if isinstance(node.target, LeafCall) and node.target.rule is not None:
        return bind(parse(node.target.rule), [tuple(t.shape) for t in tensors(node)], output_shapes(node))
    if node.target in RUN_WHOLE:
        return None
    if node.target == "copy_":  # writes a buffer or an input, which every rank holds whole, so it cannot be split
        return None
    try:
        bound = bound_rule(node)
        reason = "has no sharding rule" + (" for these arguments" if entry(node) else "")
    except RuleError as error:
        if is_registered(node):
            raise RuleError(f"{qualified_name(node)}: {error.message}", where=_place(node)) from error
        bound, reason = None, f"has a sharding rule that does not fit it ({error})"
    if bound is not None:
        return bound
    discovered = discover(node)
    if discovered.rule is not None:
        try:
            return bind(parse(discovered.rule), [tuple(t.shape) for t in tensors(node)], output_shapes(node))
        except RuleError as error:
            discovered = Found(None, f"what was discovered does not fit it ({error})")
    name = user_name(node)
    if name not in warned:
        warned.add(name)
        place = _place(node)
        message = f"{name} {reason}, and {discovered.why}: it runs replicated{f' [at {place}]' if place else ''}"
        warn(message, NoRuleWarning)
    return None


def _place(node: fx.Node) -> str:
    scope = node.meta.get(SCOPE) or ()
    return ", ".join(filter(None, [scope[-1][0] if scope else "", node.meta.get(PLACE, "")]))


def _signature(node: fx.Node) -> Hashable:
    """A key of what a node's strategies depend on, without names and positions in the graph."""

    def without_names(argument: Any) -> Any:
        return _Known(argument.meta.get(VAL)) if isinstance(argument, fx.Node) else argument

    arguments = fx.node.map_aggregate((node.args, node.kwargs), without_names)
    facts = repr([TensorFact.of(t) for t in output_tensors(node)])
    rule = node.target.rule if isinstance(node.target, LeafCall) else None
    return (node.op, target_name(node), rule, repr(arguments), facts)


class _Known:
    """A node's value whose `repr` shows only shapes, dtypes and `requires_grad` of tensors, so that it can be a key."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor):
            return repr((tuple(value.shape), value.dtype, value.requires_grad))
        if isinstance(value, (tuple, list)):
            return repr([_Known(item) for item in value])
        if isinstance(value, Mapping):
            return repr({key: _Known(item) for key, item in value.items()})
        return repr(value)
