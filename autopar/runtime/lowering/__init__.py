"""Lowering: from a traced graph and its plan to a graph that one rank runs on its local tensors."""
