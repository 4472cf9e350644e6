"""Planning in stages, and what is planned besides one plan: other schemes, meshes, micro-batches and calls."""
