"""The processing of a chunk in a worker, from its message to its commit."""
