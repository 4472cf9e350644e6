"""The traced call: its arguments, and how a later call is matched to it."""
