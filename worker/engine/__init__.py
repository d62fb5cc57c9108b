"""Texts in, vectors out: the requests and batches in flight."""
