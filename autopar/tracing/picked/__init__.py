"""Rows that a mask of unknown contents picks, `logits[mask]`: ops on them run on all rows, and leave the others out."""
