"""A plan told to people: text now."""
