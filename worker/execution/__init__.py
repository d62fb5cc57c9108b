"""Batches on their way through one model process, and what becomes of them when it fails."""
