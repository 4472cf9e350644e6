"""Facts of single ops that tracing, costs and runtime share: random numbers, writes, strides, FLOPs."""
