"""Buckets of parameters: which collectives run as one, when they begin, and what they cost."""
