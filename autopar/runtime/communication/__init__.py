"""What ranks send each other in a step: collectives, moves between layouts, and buckets of parameters in order."""
