"""Rewriting of a recorded graph: in-place writes made pure, biases split off products, dead nodes removed."""
