"""Rows of a generation: written, read, exported, deleted."""
