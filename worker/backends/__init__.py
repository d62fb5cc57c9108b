"""Backends: one is chosen, with its reason, and loaded."""
