"""Conversions from layout to layout as lists of collectives: pure functions, shared by cost, solver and runtime."""
