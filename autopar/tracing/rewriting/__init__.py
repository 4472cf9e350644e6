"""Rewriting of a recorded graph: in-place writes become values, biases are split off products, dead nodes are
removed."""
