"""The search for the best plan of a program: pruned programs, branch and bound, and the incumbent."""
