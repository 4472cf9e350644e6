"""What one op costs, measured on tensors without data: FLOPs, bytes moved, bytes kept."""
