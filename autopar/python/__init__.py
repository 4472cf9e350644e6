"""Control of Python while a model's own code runs: replaced functions, garbage collection, plain attributes."""
