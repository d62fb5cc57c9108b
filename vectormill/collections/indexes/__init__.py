"""Indexes of a generation: planned, built, tended."""
