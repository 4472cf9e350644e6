"""Sharding rules, one line of text for each op, and the strategies of every node, which are derived from them."""

if __name__ != "autopar.strategies":
    raise ImportError("import this package as autopar.strategies (pip install -e . from the project's root)")

from autopar.strategies.derive import only_replicated, strategies_for
from autopar.strategies.registering import register_rule
from autopar.strategies.rule import ShardingRule
from autopar.strategies.ruled import NoRuleWarning
from autopar.strategies.strategy import InnerCollective, Strategy

__all__ = [
    "InnerCollective",
    "NoRuleWarning",
    "ShardingRule",
    "Strategy",
    "only_replicated",
    "register_rule",
    "strategies_for",
]
