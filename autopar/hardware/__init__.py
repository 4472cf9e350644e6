"""Devices, nodes and networks: their figures, and those that are known by name."""
