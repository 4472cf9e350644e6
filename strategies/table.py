"""The table of all rules, and the rule of a node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from autopar.errors import RuleError
from autopar.strategies.arguments import Writer, op_name, output_shapes, qualified_name, tensors
from autopar.strategies.bind import Bound, bind
from autopar.strategies.ops import (
    attention,
    draws,
    elementwise,
    indexing,
    layers,
    losses,
    matrix,
    pieces,
    recurrent,
    reductions,
    routing,
    spectral,
    views,
)
from autopar.strategies.rule import ShardingRule

# Anchors: ops whose own factors are worth splitting. The others are split only where a candidate reaches them
# (positions.py).
_ANCHORS = (matrix, attention, layers, losses, recurrent, routing)
_FOLLOWERS = (elementwise, draws, reductions, views, pieces, indexing, spectral)


@dataclass(frozen=True)
class Entry:
    """One op: its name, the rule's text or a function that writes it for a node, and whether it is an anchor."""

    name: str
    rule: str | Writer
    anchor: bool


def _collect(attribute: str) -> dict[str, Entry]:
    """One table of all families' dicts of this name."""
    table: dict[str, Entry] = {}
    for family in (*_ANCHORS, *_FOLLOWERS):
        rules: dict[str, str | Writer] = getattr(family, attribute, {})
        for names, rule in rules.items():
            for name in names.split():
                if name in table:
                    raise RuleError(f"op '{name}' has two rules")
                table[name] = Entry(name, rule, family in _ANCHORS)
    return table


TABLE, OPERATORS = _collect("RULES"), _collect("OPERATORS")
parse = cache(ShardingRule.parse)


REGISTERED: dict[str, str] = {}  # rules that users registered (registering.py), by qualified name


def entry(node: fx.Node) -> Entry | None:
    """The table's entry for a node's op; a user's rule takes precedence."""
    name = qualified_name(node)
    if name in REGISTERED:
        return Entry(name, REGISTERED[name], anchor=True)
    listed = TABLE.get(op_name(node))
    if isinstance(node.target, (OpOverload, OpOverloadPacket)) and (listed is None or not isinstance(listed.rule, str)):
        return OPERATORS.get(op_name(node))  # an ATen operator may order its arguments unlike the function of its name
    return listed


def is_registered(node: fx.Node) -> bool:
    """Whether the node's rule is a user's own."""
    return qualified_name(node) in REGISTERED


def rule_text(node: fx.Node) -> str | None:
    """The rule of this node as text; None if there is none, or none for these arguments.

    RuleError if the function that writes the rule fails on the arguments: they are given in a way it does not know.
    """
    listed = entry(node)
    if listed is None:
        return None
    if isinstance(listed.rule, str):
        return listed.rule
    try:
        return listed.rule(node)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"its arguments cannot be read: {type(error).__name__}: {error}") from error


def bound_rule_or_none(node: fx.Node) -> Bound | None:
    """As `bound_rule`, but None if the rule does not fit."""
    try:
        return bound_rule(node)
    except RuleError:
        return None


def bound_rule(node: fx.Node) -> Bound | None:
    """The node's rule bound to its shapes; RuleError where the table's rule does not fit them."""
    text = rule_text(node)
    if text is None:
        return None
    return bind(parse(text), [tuple(t.shape) for t in tensors(node)], output_shapes(node))
