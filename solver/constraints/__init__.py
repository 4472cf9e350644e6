"""What the user asks of a plan: roles of mesh axes, presets, layouts pinned, forbidden or preferred by name."""
