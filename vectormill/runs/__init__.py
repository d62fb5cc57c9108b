"""Runs: long work on a collection, and how the rows that a run has read differ from a generation."""
