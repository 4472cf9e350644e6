"""Rules for ops that nobody wrote one for: found by running the op on tiny tensors, split and whole.

`discover(node)` says how an op may be split, or why it is not known. Nothing is believed that was not run: what is
found, and what an earlier process found (`cache`), passes the executed check that every rule of the table passes.
"""

from autopar.strategies.discovery.trying import Found, discover

__all__ = ["Found", "discover"]
