"""Batches of sequences under a token budget. No module here imports torch."""
