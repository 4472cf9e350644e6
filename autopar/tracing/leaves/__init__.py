"""Leaves: code that becomes one node of the graph and is not traced; and what such a node reads, writes and returns."""
