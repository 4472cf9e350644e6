"""Buckets of parameters: which parameters share collectives, when these begin, and what they cost."""
