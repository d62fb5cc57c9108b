"""Which backend encodes: one is chosen with its reason, and loaded."""
