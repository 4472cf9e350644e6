"""Torch functions and modes that are more to a trace than a node."""
