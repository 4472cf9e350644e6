"""Digests and keys that distinguish graphs, calls and versions of the code."""
