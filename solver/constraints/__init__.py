"""Constraints of the user: roles of mesh axes, presets, and layouts pinned, forbidden or preferred by name."""
