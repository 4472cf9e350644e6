"""How a graph is made up: blocks that repeat, what of them can be recomputed, and their names."""
