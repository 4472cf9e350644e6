"""Rows that a mask of unknown contents picks, `logits[mask]`: ops run on all rows and leave out the others."""
