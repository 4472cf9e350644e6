"""One call of a planned model: which graph it is for, what it is given, and what it returns."""
