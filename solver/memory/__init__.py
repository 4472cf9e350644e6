"""Memory rows of the ILP: the terms of `cost.memory` as expressions, at every moment that can be the peak."""
