"""Corrections for what loops do to DTensors of a planned model, where torch gives other results than on one process."""
