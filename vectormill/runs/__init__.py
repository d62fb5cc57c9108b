"""Runs: long work on a collection, what it has read, and how that differs from a generation."""
