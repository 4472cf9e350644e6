"""One call of a planned model: which graph it runs, what the graph is given, and what the call returns."""
