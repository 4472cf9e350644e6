"""Layout to layout as lists of collectives: pure, shared by costs, the solver and the runtime."""
