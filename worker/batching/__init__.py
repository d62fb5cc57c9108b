"""Sequences to batches under a token budget. No torch."""
