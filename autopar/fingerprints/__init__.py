"""Digests and keys that tell graphs, calls and the code itself apart."""
