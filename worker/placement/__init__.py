"""What a model needs, and later: which device loads what of it. No torch."""
