"""Torch functions and modes for which recording a node is not enough."""
