"""State of the model: what a forward reads from its model besides its arguments, and what it leaves there."""
