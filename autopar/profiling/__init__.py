"""Measures this machine's compute, memory and collectives, as a `Cluster`."""
