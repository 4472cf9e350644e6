"""Planning in stages, and what is planned beside one plan: other schemes, meshes, micro-batches and calls."""
