"""Placement: what a model needs, and which device loads what of it. No torch."""
