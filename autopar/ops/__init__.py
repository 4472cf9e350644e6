"""Facts about single ops that tracing, cost model and runtime share: random numbers, writes, strides, FLOPs."""
