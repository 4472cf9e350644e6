"""Discovers rules of ops that have none, by running the op on tiny tensors, split and unsplit.

`discover(node)` returns a rule, or the reason why none was found. Every rule is tested before it is used, also one that
an earlier process found (`cache`): it must pass the same executed check as the rules of the table.
"""

from autopar.strategies.discovery.trying import Found, discover

__all__ = ["Found", "discover"]
