"""What is done to a recorded graph: writes in place become values, products part from biases, dead nodes go."""
