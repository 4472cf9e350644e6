"""Leaves: what becomes one node of the graph and is not looked into, and what such a node reads, writes and returns."""
