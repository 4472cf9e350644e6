"""A call of a model: where it enters, the states that it goes on from, and what tells it from another."""
