"""The objective: seconds of ops, conversions and buckets, less what hides behind compute."""
