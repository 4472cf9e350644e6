"""Memory rows: the terms of `cost.memory.formulas` as expressions, at every moment where the peak can be."""
