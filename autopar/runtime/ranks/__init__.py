"""Ranks that agree before they act: what differs between them is an error on each, never a hang."""
