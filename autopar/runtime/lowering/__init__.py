"""A traced graph and its plan become a graph that one rank runs on its local tensors."""
