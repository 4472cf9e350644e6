"""The cost of one op, measured on data-free tensors: FLOPs, bytes moved, bytes saved for backward."""
