"""What loops do to the DTensors of a planned model, where torch itself gives other results than one process would."""
