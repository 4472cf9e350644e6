"""Checks between ranks: a difference between them raises an error on every rank instead of hanging."""
