"""The structure of a graph: blocks that repeat, which parts of them can be recomputed, and their names."""
