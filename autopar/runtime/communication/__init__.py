"""Communication within a step: collectives, conversions between layouts, and buckets of parameters in order."""
