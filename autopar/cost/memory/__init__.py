"""Bytes that live on one device at each moment of a step, for the prediction and for the solver's memory rows."""
