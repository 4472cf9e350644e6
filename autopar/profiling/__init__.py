"""Measuring the machine at hand: what a process computes, moves and sends, as a `Cluster`."""
