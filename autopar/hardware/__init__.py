"""Figures of devices, nodes and networks, and presets of known ones."""
