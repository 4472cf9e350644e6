"""A call of a model: its entry, the states that it continues from, and what distinguishes it from other calls."""
